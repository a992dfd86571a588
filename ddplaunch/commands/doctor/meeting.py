"""Nodes that people start one by one: they meet node 0 at a port, and it speaks to their processes from then on.

The port is the one at which the nodes of a job meet. Each side proves to the other that it knows the token, where there
is one. What a node says is data, and decoded as such; what node 0 says is checked by ``relay``.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TypeVar

import msgspec

from ddplaunch.commands.doctor.channels import Absent, Channel, Connection
from ddplaunch.commands.doctor.questions import MARK, End, write_question
from ddplaunch.commands.doctor.session import Reach
from ddplaunch.commands.doctor.ways import listen
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError, shown
from ddplaunch.wire import proof
from ddplaunch.wire.typed import parse

GREETING_PATIENCE = 5.0  # seconds for each word of a greeting
_MAX_UNKNOWN = 64  # connections that have not said who they are
_LONGEST = 4096  # bytes of such a word
_SMALL = 1000  # bytes in a packet: these pass where those of full size are lost, which we are to find out

T = TypeVar("T")


@dataclass(frozen=True)
class Welcome:
    """Node 0's first word."""

    nonce: str


@dataclass(frozen=True)
class Hello:
    """Who wants to take part."""

    node_rank: int
    nnodes: int
    host: str
    nonce: str = ""
    proof: str | None = None  # that it knows the token


@dataclass(frozen=True)
class Seat:
    """Whether it may."""

    refused: str | None  # why not
    proof: str | None  # that node 0 knows the token


class Meeting:
    """Node 0's side, from construction on; a context manager, at whose end all connections end."""

    def __init__(self, port: int, nnodes: int, token: str | None) -> None:
        """Raises UsageError where the port is taken."""
        self._nnodes, self._token = nnodes, token
        try:
            self._listening = listen(port)
        except OSError as error:
            what = f"port {port}, the one after --master-port, cannot be used here: {error.strerror}"
            hint = f"`ss -ltnp 'sport = :{port}'` shows who has it; or give all nodes another --master-port"
            raise UsageError(what, hint) from None
        self._listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL)  # also of what it accepts
        self._unknown = threading.BoundedSemaphore(_MAX_UNKNOWN)
        self._changed = threading.Condition()
        self._came: dict[int, tuple[str, Connection]] = {}
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        for _, connection in self._came.values():
            connection.end()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._nnodes) if rank not in self._came]

    def wait(self, seconds: float, check: Callable[[int], str]) -> list[Reach]:
        """Wait for the others and return how each is reached; the port is free then, and can be tried like others.

        ``check`` is what a person may type on a node that does not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.missing, seconds)
            self._close()
        why = f"it did not connect in {seconds:g} s (--join-timeout)"
        names = {os.uname().nodename}
        found = []
        for rank in range(1, self._nnodes):
            host, channel = self._came.get(rank, ("", Absent(why)))
            name = host or f"node {rank}"
            if name in names:
                name = f"{name} (node {rank})"
            names.add(name)
            found.append(Reach(name, partial(_existing, channel), check(rank)))
        return found

    def tell(self, code: int) -> None:
        """Tell all nodes node 0's exit code, with which they end."""
        for _, connection in self._came.values():
            connection.send(write_question(End(code)))

    def _close(self) -> None:
        if not self._over:
            self._over = True
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread in accept
            self._listening.close()

    def _accept(self) -> None:
        while not self._over:
            with suppress(OSError):  # the peer has gone already, or we have closed it
                connection, _ = self._listening.accept()
                if self._unknown.acquire(blocking=False):
                    threading.Thread(target=self._meet, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _meet(self, sock: socket.socket) -> None:
        try:
            connection = Connection(sock)
            if not self._greet(connection):
                connection.end()
        except OSError:  # it is gone already
            pass
        finally:
            self._unknown.release()

    def _greet(self, connection: Connection) -> bool:
        """Whether it belongs here."""
        nonce = proof.nonce()
        say(connection, Welcome(nonce))
        hello = hear(connection, Hello)
        if hello is None:
            return False
        with self._changed:
            if refused := self._why_not(hello, nonce):
                say(connection, Seat(refused, None))
                return False
            ours = proof.prove(self._token, proof.NODE_ZERO, (nonce, hello.nonce)) if self._token else None
            say(connection, Seat(None, ours))
            self._came[hello.node_rank] = shown(hello.host, 60), connection
            self._changed.notify()
            return True

    def _why_not(self, hello: Hello, nonce: str) -> str | None:
        if self._token is None and hello.proof is not None:
            return "it has a token, and node 0 has none"
        if self._token is not None and hello.proof is None:
            return "it has no token, and node 0 has one"
        if self._token and not proof.proves(hello.proof, self._token, proof.MEMBER, (nonce, hello.nonce)):
            return "its token differs"
        if hello.nnodes != self._nnodes:
            return f"node 0 has --nnodes {self._nnodes}, and it has --nnodes {hello.nnodes}"
        if not 0 < hello.node_rank < self._nnodes:
            return f"there is no node {hello.node_rank} to come"
        if hello.node_rank in self._came:
            return f"node {hello.node_rank} is there already: {self._came[hello.node_rank][0]}"
        return "it comes too late" if self._over else None


def _existing(channel: Channel) -> Channel:
    return channel


def say(connection: Connection, word: Welcome | Hello | Seat) -> None:
    """Send a word of the greeting."""
    connection.send(MARK + msgspec.json.encode(word) + b"\n")


def hear(connection: Connection, kind: type[T]) -> T | None:
    """Wait for a word of the greeting; None if it does not come, or something else does."""
    line = connection.line(time.monotonic() + GREETING_PATIENCE, _LONGEST) or b""
    with suppress(msgspec.MsgspecError, RecursionError):
        return parse(line.removeprefix(MARK), kind) if line.startswith(MARK) else None
    return None
