"""Node 0's listener on the control port: accepts connections, checks hello and token, limits unauthenticated ones."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Protocol

from msgspec.structs import replace

from ddplaunch.base.connection import MAX_UNAUTHENTICATED_FRAME, Connection
from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core import messages
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import PROTOCOL_VERSION, JoinDeclined, Message, NodeHello
from ddplaunch.core.net import token_auth
from ddplaunch.core.options import Nodes
from ddplaunch.system.network.kernel_limits import raise_fd_limit

HELLO_TIMEOUT_S = 10.0  # for the first message of a new connection
MAX_UNAUTHENTICATED = 512  # besides those of joined nodes; a new one closes the oldest
MIN_UNAUTHENTICATED = 4  # even with few file descriptors: otherwise no node could join
LINGER_S = 1.0  # for JoinRefused to be delivered
RESERVED_FDS = 64  # for the launcher itself: files, sockets, pipes, zygotes
RESERVED_FDS_PER_RANK = 10  # three streams from both ends, a log, its process, the store
ACCEPT_PAUSE_S = 0.5  # before accepting again after a lack of file descriptors

_TOKEN_HINT = "give every node the same --token, or the same DDPLAUNCH_TOKEN"


class PeerHandler(Protocol):
    """Receives the connections of nodes that belong to the job."""

    def on_peer(self, connection: Connection[Message], hello: NodeHello | JoinDeclined, proof: str | None) -> None:
        """Called with a node's first message; ``proof`` is node 0's token proof, None without a token."""


class ControlPortListener:
    """Accepts connections on the control port; passes on those of nodes of the job."""

    def __init__(
        self,
        loop: EventLoop,
        listener_socket: socket.socket,
        config: JobConfig,
        ranks: int,
        handler: PeerHandler,
    ) -> None:
        """``ranks``: the number of local ranks, for which file descriptors are left free."""
        self._loop = loop
        self._socket = listener_socket
        self._token = config.options[Nodes].token
        free = raise_fd_limit() - RESERVED_FDS - RESERVED_FDS_PER_RANK * ranks - config.max_nodes
        self._max_unauthenticated = max(MIN_UNAUTHENTICATED, min(MAX_UNAUTHENTICATED + config.max_nodes, free))
        self._handler = handler
        self._unauthenticated: dict[Connection[Message], Timer] = {}
        self._refused: list[Connection[Message]] = []
        self.rejected: Counter[str] = Counter()  # number of rejected connections by reason
        listener_socket.setblocking(False)
        loop.watch_fd(listener_socket.fileno(), self._accept)

    def close(self) -> list[Connection[Message]]:
        """Stop listening; return the refused connections, which close by themselves."""
        for connection in list(self._unauthenticated):
            self._remove_unauthenticated(connection)
            connection.close()
        self._loop.unwatch_fd(self._socket.fileno())
        self._socket.close()
        return self._refused

    def refuse(self, connection: Connection[Message], refusal: messages.JoinRefused) -> None:
        """Send why a node is refused; close once that is delivered."""
        self._refused.append(connection)
        connection.send(refusal)
        connection.close_gracefully(LINGER_S)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no file descriptor is left, or the peer has closed already
            self._loop.unwatch_fd(self._socket.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)
            return
        self._refused = [each for each in self._refused if each.is_open]
        if len(self._unauthenticated) + len(self._refused) >= self._max_unauthenticated:
            if self._refused:
                self._refused.pop(0).close()
            else:
                self._reject(next(iter(self._unauthenticated)), "sent nothing")
        nonce = token_auth.new_nonce()
        connection: Connection[Message] = Connection(
            self._loop,
            sock,
            (NodeHello, JoinDeclined),
            on_message=lambda message: self._on_first_message(connection, message, nonce),
            on_lost=lambda why: self._reject(
                connection, "spoke another protocol" if "protocol" in why else "disconnected"
            ),
            max_bytes=MAX_UNAUTHENTICATED_FRAME,
        )
        self._unauthenticated[connection] = self._loop.call_later(
            HELLO_TIMEOUT_S, lambda: self._reject(connection, "sent nothing")
        )
        connection.send(messages.Welcome(PROTOCOL_VERSION, nonce))

    def _resume_accepting(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch_fd(self._socket.fileno(), self._accept)

    def _on_first_message(self, connection: Connection[Message], message: Message, nonce: str) -> None:
        assert isinstance(message, NodeHello | JoinDeclined)
        self._remove_unauthenticated(connection)
        if why := self._check_proof(message, nonce):
            self.rejected[why] += 1
            return self.refuse(connection, messages.JoinRefused(f"node 0 refuses {message.name}: {why}", _TOKEN_HINT))
        own_proof = (
            token_auth.compute_proof(self._token, token_auth.ROLE_NODE_ZERO, (nonce, message.nonce))
            if self._token
            else None
        )
        self._handler.on_peer(connection, replace(message, proof=None), own_proof)

    def _check_proof(self, hello: NodeHello | JoinDeclined, nonce: str) -> str | None:
        if self._token is None:
            return "it has a token, and node 0 has none" if hello.proof is not None else None
        if hello.proof is None:
            return "it has no token"
        is_valid = token_auth.verify_proof(hello.proof, self._token, token_auth.ROLE_MEMBER, (nonce, hello.nonce))
        return None if is_valid else "its token differs"

    def _reject(self, connection: Connection[Message], why: str) -> None:
        self.rejected[why] += 1
        self._remove_unauthenticated(connection)
        connection.close()

    def _remove_unauthenticated(self, connection: Connection[Message]) -> None:
        self._unauthenticated.pop(connection).cancel()
