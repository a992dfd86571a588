"""The ways between nodes, tried: a node listens at ports, and each of the others connects and sends there.

First whether a byte goes there and back. Then what a way carries: small packets, of which the kernel counts the lost
ones and times the others, and a stream, which begins with packets of full size: a path that drops those and tells
nobody lets the small ones through (RFC 2923, "black hole detection").
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import log2
from typing import Literal, NamedTuple

from ddplaunch.control.port import listen_everywhere
from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import Amount, Count, Line, Seconds, Size
from ddplaunch.wire.frames import read

CONNECT_DEADLINE = 3.5  # seconds, in which the kernel sends three SYNs or more
SMALL_DEADLINE = 3.0
LARGE_DEADLINE = 3.0
TRIES = 2  # of what gets no answer: where packets are lost, another connection may come through
NONCE = 16  # bytes that a node expects, and no other program knows
_SYNS = 3  # lost packets of a connection that gets no answer
_AT_ONCE = 128

_MESSAGE = 32  # bytes: each goes as a packet of its own
_WINDOW = 8  # of them on the way: fewer than TCP's first window, and too few to fill any queue
_FEW, _MANY = 300, 1000  # messages; the many where one of the few was lost
MANY_LOST = 3  # packets
_EXCHANGE_PATIENCE, _LOSSY_PATIENCE = 2.0, 5.0  # seconds for the messages, and where too few were sent to tell

_STREAM = 8 << 20  # bytes
_STREAM_PATIENCE = 0.3, 2.5  # seconds, the more the longer a packet takes: TCP begins slowly
_FIRST_WINDOW = 14_000  # bytes that TCP sends before it hears from the other end; then it doubles
_FIRST = 1 << 16
_TICK = 0.004  # seconds: the kernel counts in steps like this

_REACH, _ECHO, _SINK = b"r", b"e", b"s"

Outcome = Literal["ok", "refused", "silent", "unreachable", "stranger"]
"""How a try ended: "stranger" is another program that listens there."""


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


@dataclass(frozen=True)
class Pinged:
    """What became of small packets, as far as the kernel tells."""

    seconds: Seconds | None  # the shortest time there and back
    sent: Size
    lost: Size  # on the way there

    def __post_init__(self) -> None:
        if self.lost > self.sent:
            raise ValueError("more packets lost than sent")


@dataclass(frozen=True)
class Streamed:
    """What became of a stream."""

    large: bool  # whether packets of full size arrive
    rate: Amount | None  # bytes a second


class Responder:
    """Listens at all addresses of this machine until it is closed."""

    def __init__(self, ports: Sequence[int], nonce: str) -> None:
        self._nonce = nonce.encode()
        self._sockets: list[socket.socket] = []
        taken: dict[int, str] = {}
        any_port = 0
        for port in (*ports, 0):
            try:
                listening = listen_everywhere(port)
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
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = _receive(connection, NONCE + 1, SMALL_DEADLINE)
            if asked[:NONCE] != self._nonce:
                return
            connection.sendall(self._nonce)
            connection.settimeout(_LOSSY_PATIENCE)
            if asked[NONCE:] == _ECHO:
                _echo(connection)
            elif asked[NONCE:] == _SINK:
                _take_in(connection)


def _echo(connection: socket.socket) -> None:
    left = b""
    while data := connection.recv(4096):
        left += data
        while len(left) >= _MESSAGE:
            connection.send(left[:_MESSAGE])
            left = left[_MESSAGE:]


def _take_in(connection: socket.socket) -> None:
    """Say when the first bytes have come, and when all have."""
    room = bytearray(1 << 20)
    if connection.recv_into(room):
        connection.sendall(b"+")
        while connection.recv_into(room):
            pass
        connection.sendall(b".")


def new_nonce() -> str:
    return secrets.token_hex(NONCE // 2)


def patience(count: int) -> float:
    """How many seconds so many tries take at most."""
    return (1 + count // _AT_ONCE) * TRIES * (CONNECT_DEADLINE + SMALL_DEADLINE)


PING_DEADLINE = TRIES * (CONNECT_DEADLINE + SMALL_DEADLINE) + _LOSSY_PATIENCE
STREAM_DEADLINE = TRIES * (CONNECT_DEADLINE + SMALL_DEADLINE) + LARGE_DEADLINE + max(_STREAM_PATIENCE)


def try_ways(places: Sequence[tuple[str, int]], nonce: str) -> tuple[Tried, ...]:
    """Try these ways, many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(lambda place: _try(place, nonce.encode()), places))


def _try(place: tuple[str, int], nonce: bytes) -> Tried:
    reached = _connect(place, nonce + _REACH)
    if reached.connection:
        reached.connection.close()
    return reached.tried


class _Reached(NamedTuple):
    tried: Tried
    connection: socket.socket | None
    lost: int  # packets of tries without an answer


def _connect(place: tuple[str, int], words: bytes) -> _Reached:
    """Connect and say these words, again where nobody answers."""
    lost = 0
    for _ in range(TRIES):
        try:
            connection = socket.create_connection(place, CONNECT_DEADLINE)
        except ConnectionRefusedError:
            return _Reached(Tried("refused"), None, lost)
        except TimeoutError:
            tried, lost = Tried("silent"), lost + _SYNS
            continue
        except (OSError, ValueError):  # what a node says is its address may be none
            tried = Tried("unreachable")
            continue
        began = time.monotonic()
        with suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(words)
            if _receive(connection, NONCE, SMALL_DEADLINE) == words[:NONCE]:
                return _Reached(Tried("ok", time.monotonic() - began), connection, lost)
        tried = Tried("stranger")
        with connection:
            counts = _count(connection)
        lost += counts.lost if counts else 0  # the node may have no time to answer
    return _Reached(tried, None, lost)


# ---------------------------------------------------------------------------------------------------- what it carries


class _Counts(NamedTuple):
    """Of a connection, from the fields of struct tcp_info (linux/tcp.h) that have been there since Linux 4.19."""

    resent: int
    arrived: int  # bytes that the other end has acknowledged
    round_trip: int  # microseconds, the shortest; the kernel answers, however busy the program is
    packets: int  # with data, sent
    busy: int  # microseconds in which something was under way
    doubled: int  # packets that the other end had already: these were not lost

    @property
    def lost(self) -> int:
        return max(0, self.resent - self.doubled)


_COUNTS = struct.Struct("=100xI16xQ20xI4xI8xQ40xI")


def _count(connection: socket.socket) -> _Counts | None:
    """None where the kernel does not tell."""
    with suppress(OSError, AttributeError):
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        if len(told) == _COUNTS.size:
            return _Counts(*_COUNTS.unpack(told))
    return None


def ping(place: tuple[str, int], nonce: str) -> Pinged:
    """Exchange small packets with a node, a few at a time."""
    tried, connection, unheard = _connect(place, nonce.encode() + _ECHO)
    if connection is None:
        return Pinged(None, unheard, unheard)
    with connection:
        sent = _exchange(connection)
        counts = _count(connection)
    if counts is None:
        return Pinged(tried.seconds, sent, unheard)
    sent = max(counts.packets, counts.lost)  # a lost SYN is no packet with data
    return Pinged(counts.round_trip / 1e6, sent + unheard, counts.lost + unheard)


def _exchange(connection: socket.socket) -> int:
    """Return how many were sent: more where one was lost, and fewer where many are."""
    wanted, sent, came = _FEW, 0, 0
    began = time.monotonic()
    with suppress(OSError):
        while came < wanted * _MESSAGE:
            passed, counts = time.monotonic() - began, _count(connection)
            few_lost = counts is not None and 0 < counts.lost < MANY_LOST
            if passed > (_LOSSY_PATIENCE if few_lost else _EXCHANGE_PATIENCE):
                break
            while sent < wanted and sent * _MESSAGE - came < _WINDOW * _MESSAGE:
                connection.send(bytes(_MESSAGE))
                sent += 1
            connection.settimeout(_EXCHANGE_PATIENCE / 4)
            with suppress(TimeoutError):
                if not (data := connection.recv(4096)):
                    break
                came += len(data)
            if counts is not None and counts.lost:
                wanted = _MANY
    return sent


def stream(place: tuple[str, int], nonce: str) -> Streamed | None:
    """Send much at once, and no longer than a moment. None where no connection comes about."""
    connection = _connect(place, nonce.encode() + _SINK).connection
    if connection is None:
        return None
    with connection:
        # What has not arrived at the end of the moment never will: nobody waits for it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        began = time.monotonic()
        try:
            connection.settimeout(LARGE_DEADLINE)
            connection.sendall(bytes(_FIRST))
            _receive(connection, 1, LARGE_DEADLINE)
        except (OSError, EOFError):
            return Streamed(False, None)
        whole = _pour(connection)
        seconds = time.monotonic() - began
        if (counts := _count(connection)) is None:
            return Streamed(True, _STREAM / seconds if whole else None)
        round_trip = counts.round_trip / 1e6
        slow_start = round_trip * log2(1 + counts.arrived / _FIRST_WINDOW)
        return Streamed(True, counts.arrived / max(_TICK, counts.busy / 1e6 - slow_start))


def _pour(connection: socket.socket) -> bool:
    """Whether all has arrived in time."""
    counts = _count(connection)
    least, most = _STREAM_PATIENCE
    until = time.monotonic() + min(most, max(least, 20e-6 * counts.round_trip if counts else 0.0))
    chunk, left = bytes(1 << 18), _STREAM - _FIRST
    try:
        while left > 0:
            connection.settimeout(max(1e-3, until - time.monotonic()))
            left -= connection.send(chunk)
            if time.monotonic() > until:
                return False
        connection.shutdown(socket.SHUT_WR)
        return _receive(connection, 1, until - time.monotonic()) == b"."
    except (OSError, EOFError):
        return False


def _receive(connection: socket.socket, count: int, seconds: float) -> bytes:
    """Receive so many bytes in that time. Raises OSError or EOFError."""
    return read(connection, count, time.monotonic() + seconds)
