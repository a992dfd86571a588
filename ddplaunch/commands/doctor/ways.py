"""The ways between nodes, tried: a node listens at ports, and each of the others connects and sends there.

First a byte goes there and back, then 64 KiB each way: a path that drops large packets and tells nobody lets the first
through and not the second (RFC 2923, "black hole detection").
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import Count, Line, Seconds
from ddplaunch.wire.frames import read

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

    any_port: Count  # one that the kernel chose, as gloo and NCCL take them
    taken: tuple[tuple[Count, Line], ...]  # ports where it cannot, and why


@dataclass(frozen=True)
class Tried:
    """How it went."""

    outcome: Outcome
    seconds: Seconds | None = None  # there and back, of one byte


class Responder:
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
                taken[port] = os.strerror(error.errno or 0)
                continue
            self._sockets.append(listening)
            any_port = listening.getsockname()[1]
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        self.listening = Listening(any_port, tuple(taken.items()))

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
        with connection, suppress(OSError, EOFError):
            if _receive(connection, NONCE, SMALL_DEADLINE) != self._nonce:
                return
            connection.sendall(self._nonce)
            _receive(connection, LARGE, SMALL_DEADLINE + LARGE_DEADLINE)
            connection.sendall(b"+")
            _receive(connection, 1, LARGE_DEADLINE)
            connection.sendall(bytes(LARGE))
            _receive(connection, 1, LARGE_DEADLINE)


def new_nonce() -> str:
    return secrets.token_hex(NONCE // 2)


def patience(count: int) -> float:
    """How many seconds so many tries take at most."""
    return (1 + count // _AT_ONCE) * (CONNECT_DEADLINE + SMALL_DEADLINE + 2 * LARGE_DEADLINE)


def try_ways(places: Sequence[tuple[str, int]], nonce: str) -> tuple[Tried, ...]:
    """Try these ways, many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(lambda place: _try(place, nonce.encode()), places))


def _try(place: tuple[str, int], nonce: bytes) -> Tried:
    try:
        connection = socket.create_connection(place, CONNECT_DEADLINE)
    except ValueError:  # what a node says is its address cannot be one
        return Tried("unreachable")
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            return Tried("refused")
        waited = isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT
        return Tried("silent" if waited else "unreachable")
    outcome: Outcome = "stranger"
    seconds = None
    with connection, suppress(OSError, EOFError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        connection.sendall(nonce)
        if _receive(connection, NONCE, SMALL_DEADLINE) != nonce:
            return Tried("stranger")
        seconds = time.monotonic() - began
        outcome = "large out"
        connection.settimeout(LARGE_DEADLINE)
        connection.sendall(bytes(LARGE))
        _receive(connection, 1, LARGE_DEADLINE)
        outcome = "large back"
        connection.sendall(b"+")
        _receive(connection, LARGE, LARGE_DEADLINE)
        outcome = "ok"
    return Tried(outcome, seconds)


def listen(port: int) -> socket.socket:
    """Listen at all addresses of this machine. Raises OSError."""
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError) as error:  # this machine may have no IPv6
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
    return socket.create_server(("0.0.0.0", port))


def _receive(connection: socket.socket, count: int, seconds: float) -> bytes:
    """Receive so many bytes in that time. Raises OSError or EOFError."""
    return read(connection, count, time.monotonic() + seconds)
