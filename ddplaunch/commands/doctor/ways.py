"""The ways between nodes, tried: a node listens at ports, and each of the others connects and sends there.

First a byte goes there and back, then 64 KiB each way: a path that drops large packets and tells nobody lets the first
through and not the second (RFC 2923, "black hole detection").
"""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Literal

from msgspec import Meta

from ddplaunch.dataclass import dataclass

CONNECT_DEADLINE = 4.0  # seconds: of three SYNs one arrives, also where some are lost
SMALL_DEADLINE = 4.0
LARGE_DEADLINE = 6.0
LARGE = 64 << 10  # bytes, more than seven jumbo frames
NONCE = 16  # bytes that a node expects, and no other program knows
_AT_ONCE = 64

Outcome = Literal["ok", "refused", "silent", "unreachable", "stranger", "large out", "large back"]
"""How a try ended: "stranger" is another program that listens there, "large out" large packets lost on the way there,
"large back" on the way back."""


@dataclass(frozen=True)
class Listening:
    """Where a node listens."""

    any_port: Annotated[int, Meta(ge=0, le=65535)]  # one that the kernel chose, as gloo and NCCL take them
    taken: dict[int, str]  # ports where it cannot, and why


@dataclass(frozen=True)
class Place:
    """Where to connect."""

    address: str
    port: int


@dataclass(frozen=True)
class Tried:
    """How it went."""

    outcome: Outcome
    seconds: float | None = None  # there and back, of one byte


class Listener:
    """Listens at all addresses of this machine until it is closed."""

    def __init__(self, ports: Sequence[int], nonce: str) -> None:
        self._nonce = nonce.encode()
        self._sockets: list[socket.socket] = []
        taken: dict[int, str] = {}
        any_port = 0
        for port in (*ports, 0):
            try:
                listening = listen(port)
            except OSError as error:
                taken[port] = error.strerror or type(error).__name__
                continue
            self._sockets.append(listening)
            any_port = listening.getsockname()[1]
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        self.listening = Listening(any_port, taken)

    def close(self) -> None:
        """Listen no more."""
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread in accept
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(SMALL_DEADLINE + LARGE_DEADLINE)
            if _receive(connection, NONCE) != self._nonce:
                return
            connection.sendall(self._nonce)
            if len(_receive(connection, LARGE)) == LARGE:
                connection.sendall(b"+")
                if _receive(connection, 1):
                    connection.sendall(bytes(LARGE))
                    _receive(connection, 1)


def new_nonce() -> str:
    return secrets.token_hex(NONCE // 2)


def try_ways(places: Sequence[Place], nonce: str) -> tuple[Tried, ...]:
    """Try these ways, many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(lambda place: _try(place, nonce.encode()), places))


def _try(place: Place, nonce: bytes) -> Tried:
    try:
        connection = socket.create_connection((place.address, place.port), CONNECT_DEADLINE)
    except ValueError:  # what a node says is its address cannot be one
        return Tried("unreachable")
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            return Tried("refused")
        waited = isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT
        return Tried("silent" if waited else "unreachable")
    with connection:
        try:
            connection.settimeout(SMALL_DEADLINE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.monotonic()
            connection.sendall(nonce)
            if _receive(connection, NONCE) != nonce:
                return Tried("stranger")
            seconds = time.monotonic() - began
        except OSError:
            return Tried("stranger")
        outcome: Outcome = "large out"
        with suppress(OSError):
            connection.settimeout(LARGE_DEADLINE)
            connection.sendall(bytes(LARGE))
            if _receive(connection, 1):
                outcome = "large back"
                connection.sendall(b"+")
                if len(_receive(connection, LARGE)) == LARGE:
                    outcome = "ok"
        return Tried(outcome, seconds)


def listen(port: int) -> socket.socket:
    """Listen at all addresses of this machine. Raises OSError."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind((address, port))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # without IPv6
            raise
        return listening
    raise AssertionError("the loop returns or raises")


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes, fewer at the end, within the socket's timeout."""
    until = time.monotonic() + (connection.gettimeout() or 0)
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            break
        data += part
    return data
