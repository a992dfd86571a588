"""Node 0's control port: accepts connections, and checks which of them belong to the job."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from ddplaunch.control import messages
from ddplaunch.control.limits import raise_fd_limit
from ddplaunch.control.messages import PROTOCOL_VERSION, JoinDeclined, Message, NodeHello
from ddplaunch.control.rules import JobConfig
from ddplaunch.dataclass import replace
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.wire import proof
from ddplaunch.wire.connection import MAX_UNAUTHENTICATED_FRAME, Connection

HELLO_TIMEOUT_S = 10.0  # seconds in which a new connection must say hello
MAX_UNAUTHENTICATED = 512  # connections besides the nodes that have joined; the oldest is closed when one more comes
MIN_UNAUTHENTICATED = 4  # so many are allowed however few descriptors we have, or no node could join
LINGER_S = 1.0  # seconds in which a refused connection must have read why
RESERVED_FDS = 64  # descriptors of the launcher itself: its files, sockets, pipes, those of the zygote and of sidecars
RESERVED_FDS_PER_RANK = 10  # three streams from both ends, a log, its process, the store
ACCEPT_PAUSE_S = 0.5  # seconds without accepting where the system has no descriptor left

_TOKEN_HINT = "give every node the same --token, or the same DDPLAUNCH_TOKEN"


class Listener:
    """Accepts connections, and hands over those that belong here."""

    def __init__(
        self,
        loop: EventLoop,
        listener_socket: socket.socket,
        config: JobConfig,
        ranks: int,
        on_peer: Callable[[Connection[Message], NodeHello | JoinDeclined, str | None], None],
    ) -> None:
        """``on_peer`` gets a connection, its first message, and our own proof for it if there is a token.

        ``ranks`` are those that this node starts: their descriptors stay free.
        """
        self._loop = loop
        self._socket = listener_socket
        self._token = config.token
        free = raise_fd_limit() - RESERVED_FDS - RESERVED_FDS_PER_RANK * ranks - config.max_nodes
        self._most_unknown = max(MIN_UNAUTHENTICATED, min(MAX_UNAUTHENTICATED + config.max_nodes, free))
        self._meet = on_peer
        self._unknown: dict[Connection[Message], Timer] = {}
        self._leaving: list[Connection[Message]] = []
        self.strangers: Counter[str] = Counter()  # connections that did not belong to the job, by reason
        listener_socket.setblocking(False)
        loop.watch_fd(listener_socket.fileno(), self._accept)

    def close(self) -> list[Connection[Message]]:
        """Stop; return the refused connections, which part by themselves."""
        for connection in list(self._unknown):
            self._remove(connection)
            connection.close()
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()
        return self._leaving

    def refuse(self, connection: Connection[Message], refused: messages.JoinRefused) -> None:
        """Tell a connection why it is refused, and give it a moment to read that."""
        self._leaving.append(connection)
        connection.send(refused)
        connection.close_gracefully(LINGER_S)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the peer has gone already
            self._loop.unwatch_fd(self._socket.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)
            return
        self._leaving = [each for each in self._leaving if each.is_open]
        if len(self._unknown) + len(self._leaving) >= self._most_unknown:
            if self._leaving:
                self._leaving.pop(0).close()
            else:
                self._reject(next(iter(self._unknown)), "said nothing")
        nonce = proof.new_nonce()
        connection: Connection[Message] = Connection(
            self._loop,
            sock,
            (NodeHello, JoinDeclined),
            on_message=lambda message: self._on_first_message(connection, message, nonce),
            on_lost=lambda why: self._reject(connection, "spoke something else" if "speaks" in why else "went away"),
            max_bytes=MAX_UNAUTHENTICATED_FRAME,
        )
        self._unknown[connection] = self._loop.call_later(
            HELLO_TIMEOUT_S, lambda: self._reject(connection, "said nothing")
        )
        connection.send(messages.Welcome(PROTOCOL_VERSION, nonce))

    def _resume_accepting(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch_fd(self._socket.fileno(), self._accept)

    def _on_first_message(self, connection: Connection[Message], message: Message, nonce: str) -> None:
        assert isinstance(message, NodeHello | JoinDeclined)
        self._remove(connection)
        if why := self._check_proof(message, nonce):
            self.strangers[why] += 1
            return self.refuse(connection, messages.JoinRefused(f"node 0 refuses {message.name}: {why}", _TOKEN_HINT))
        ours = proof.compute_proof(self._token, proof.ROLE_NODE_ZERO, (nonce, message.nonce)) if self._token else None
        self._meet(connection, replace(message, proof=None), ours)

    def _check_proof(self, hello: NodeHello | JoinDeclined, nonce: str) -> str | None:
        if self._token is None:
            return "it has a token, and node 0 has none" if hello.proof is not None else None
        if hello.proof is None:
            return "it has no token"
        proven = proof.verify_proof(hello.proof, self._token, proof.ROLE_MEMBER, (nonce, hello.nonce))
        return None if proven else "its token differs"

    def _reject(self, connection: Connection[Message], why: str) -> None:
        self.strangers[why] += 1
        self._remove(connection)
        connection.close()

    def _remove(self, connection: Connection[Message]) -> None:
        self._unknown.pop(connection).cancel()
