"""Node 0's control port: who knocks there, and who of them belongs to the job."""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ddplaunch.control import messages, proof
from ddplaunch.control.messages import PROTOCOL, Hello, Message
from ddplaunch.control.wire import MOST_BEFORE_JOINING, Connection
from ddplaunch.loop import Loop, Timer

PATIENCE = 10.0
"""Seconds in which whoever connects must say hello."""

MOST_UNKNOWN = 512
"""Connections beyond the job's own nodes that have not said hello yet; the oldest goes when one more comes."""

FULL_PAUSE = 0.5
"""Seconds without accepting where the system has no descriptor left."""


class Listener:
    """Accepts connections, and hands over those that belong here."""

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket,
        token: str | None,
        nodes: int,
        meet: Callable[[Connection, Hello, str | None], None],
    ) -> None:
        """``meet`` gets a connection, its hello, and our own proof for it where there is a token."""
        self._loop = loop
        self._socket = listening
        self._token = token
        self._most_unknown = MOST_UNKNOWN + nodes
        self._meet = meet
        self._unknown: dict[Connection, Timer] = {}
        self.strangers: Counter[str] = Counter()
        """How many did not belong here, by the reason."""
        listening.setblocking(False)
        _allow_many_descriptors()
        loop.watch(listening.fileno(), self._accept)

    def close(self) -> None:
        for connection in list(self._unknown):
            self._forget(connection)
            connection.close()
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, or the peer has gone already
            self._loop.forget(self._socket.fileno())
            self._loop.after(FULL_PAUSE, self._resume)
            return
        if len(self._unknown) >= self._most_unknown:
            self._turn_away(next(iter(self._unknown)), "said nothing")
        nonce = proof.nonce()
        connection = Connection(
            self._loop,
            sock,
            (Hello,),
            hear=lambda message: self._greeted(connection, message, nonce),
            lost=lambda why: self._turn_away(connection, "spoke something else" if "speaks" in why else "went away"),
            most=MOST_BEFORE_JOINING,
        )
        self._unknown[connection] = self._loop.after(PATIENCE, lambda: self._turn_away(connection, "said nothing"))
        connection.send(messages.Welcome(PROTOCOL, nonce))

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), self._accept)

    def _greeted(self, connection: Connection, message: Message, nonce: str) -> None:
        assert isinstance(message, Hello)
        self._forget(connection)
        if why := self._impostor(message, nonce):
            self.strangers[why] += 1
            connection.lost = lambda _: None
            connection.hear = lambda _: None
            connection.send(messages.Refused(f"node 0 does not let {message.share.name} in: {why}", _HINTS[why]))
            connection.finish()
            return
        ours = proof.prove(self._token, proof.NODE_ZERO, (nonce, message.nonce)) if self._token else None
        self._meet(connection, replace(message, proof=None), ours)

    def _impostor(self, hello: Hello, nonce: str) -> str | None:
        if self._token is None:
            return NO_TOKEN if hello.proof is not None else None
        if hello.proof is None:
            return TOKEN_MISSING
        return None if proof.proves(hello.proof, self._token, proof.MEMBER, (nonce, hello.nonce)) else TOKEN_WRONG

    def _turn_away(self, connection: Connection, why: str) -> None:
        self.strangers[why] += 1
        self._forget(connection)
        connection.close()

    def _forget(self, connection: Connection) -> None:
        timer = self._unknown.pop(connection, None)
        if timer is not None:
            timer.cancel()


TOKEN_WRONG = "its token is another"
TOKEN_MISSING = "it has no token"
NO_TOKEN = "it has a token, and node 0 has none"
_HINTS = dict.fromkeys(
    (TOKEN_WRONG, TOKEN_MISSING, NO_TOKEN), "give every node the same --token, or the same DDPLAUNCH_TOKEN"
)


def _allow_many_descriptors() -> None:
    """Raise our limit of open files as far as we may; the ranks have been given theirs before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            pass
