"""Node 0's control port: accepts connections, and checks which of them belong to the job."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from ddplaunch.control import messages
from ddplaunch.control.limits import raised_descriptors
from ddplaunch.control.messages import PROTOCOL, Declined, Hello, Message
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import replace
from ddplaunch.loop import Loop, Timer
from ddplaunch.wire import proof
from ddplaunch.wire.connection import MAX_BEFORE_JOINING, Connection

PATIENCE = 10.0  # seconds in which a new connection must say hello
MAX_UNKNOWN = 512  # connections besides the nodes that have joined; the oldest is closed when one more comes
MIN_UNKNOWN = 4  # so many are allowed however few descriptors we have, or no node could join
PARTING = 1.0  # seconds in which a refused connection must have read why
RESERVED = 64  # descriptors of the launcher itself: its files, sockets, pipes, those of the zygote and of sidecars
RESERVED_PER_RANK = 10  # three streams from both ends, a log, its process, the store
FULL_PAUSE = 0.5  # seconds without accepting where the system has no descriptor left

_HINT = "give every node the same --token, or the same DDPLAUNCH_TOKEN"


class Listener:
    """Accepts connections, and hands over those that belong here."""

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket,
        rules: Rules,
        ranks: int,
        meet: Callable[[Connection[Message], Hello | Declined, str | None], None],
    ) -> None:
        """``meet`` gets a connection, its first message, and our own proof for it if there is a token.

        ``ranks`` are those that this node starts: their descriptors stay free.
        """
        self._loop = loop
        self._socket = listening
        self._token = rules.token
        free = raised_descriptors() - RESERVED - RESERVED_PER_RANK * ranks - rules.max_nodes
        self._most_unknown = max(MIN_UNKNOWN, min(MAX_UNKNOWN + rules.max_nodes, free))
        self._meet = meet
        self._unknown: dict[Connection[Message], Timer] = {}
        self._leaving: list[Connection[Message]] = []
        self.strangers: Counter[str] = Counter()  # connections that did not belong to the job, by reason
        listening.setblocking(False)
        loop.watch(listening.fileno(), self._accept)

    def close(self) -> list[Connection[Message]]:
        """Stop; return the refused connections, which part by themselves."""
        for connection in list(self._unknown):
            self._forget(connection)
            connection.close()
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        return self._leaving

    def dismiss(self, connection: Connection[Message], refused: messages.Refused) -> None:
        """Tell a connection why it is refused, and give it a moment to read that."""
        self._leaving.append(connection)
        connection.send(refused)
        connection.part(PARTING)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the peer has gone already
            self._loop.forget(self._socket.fileno())
            self._loop.after(FULL_PAUSE, self._resume)
            return
        self._leaving = [each for each in self._leaving if each.open]
        if len(self._unknown) + len(self._leaving) >= self._most_unknown:
            if self._leaving:
                self._leaving.pop(0).close()
            else:
                self._turn_away(next(iter(self._unknown)), "said nothing")
        nonce = proof.nonce()
        connection: Connection[Message] = Connection(
            self._loop,
            sock,
            (Hello, Declined),
            hear=lambda message: self._greeted(connection, message, nonce),
            lost=lambda why: self._turn_away(connection, "spoke something else" if "speaks" in why else "went away"),
            max_bytes=MAX_BEFORE_JOINING,
        )
        self._unknown[connection] = self._loop.after(PATIENCE, lambda: self._turn_away(connection, "said nothing"))
        connection.send(messages.Welcome(PROTOCOL, nonce))

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), self._accept)

    def _greeted(self, connection: Connection[Message], message: Message, nonce: str) -> None:
        assert isinstance(message, Hello | Declined)
        self._forget(connection)
        if why := self._impostor(message, nonce):
            self.strangers[why] += 1
            return self.dismiss(connection, messages.Refused(f"node 0 refuses {message.name}: {why}", _HINT))
        ours = proof.prove(self._token, proof.NODE_ZERO, (nonce, message.nonce)) if self._token else None
        self._meet(connection, replace(message, proof=None), ours)

    def _impostor(self, hello: Hello | Declined, nonce: str) -> str | None:
        if self._token is None:
            return "it has a token, and node 0 has none" if hello.proof is not None else None
        if hello.proof is None:
            return "it has no token"
        proven = proof.proves(hello.proof, self._token, proof.MEMBER, (nonce, hello.nonce))
        return None if proven else "its token differs"

    def _turn_away(self, connection: Connection[Message], why: str) -> None:
        self.strangers[why] += 1
        self._forget(connection)
        connection.close()

    def _forget(self, connection: Connection[Message]) -> None:
        self._unknown.pop(connection).cancel()
