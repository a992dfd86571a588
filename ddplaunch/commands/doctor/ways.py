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

from ddplaunch.control.port import listen_on_all_interfaces
from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import Count, NonNegativeFloat, Seconds, Size, TextLine
from ddplaunch.wire.frames import read_exactly

CONNECT_TIMEOUT_S = 3.5  # seconds, in which the kernel sends three SYNs or more
SMALL_REPLY_TIMEOUT_S = 3.0
LARGE_REPLY_TIMEOUT_S = 3.0
MAX_ATTEMPTS = 2  # of what gets no answer: where packets are lost, another connection may come through
NONCE_BYTES = 16  # bytes that a node expects, and no other program knows
_SYNS = 3  # lost packets of a connection that gets no answer
_MAX_CONCURRENT = 128

_MESSAGE = 32  # bytes: each goes as a packet of its own
_WINDOW = 8  # of them on the way: fewer than TCP's first window, and too few to fill any queue
_MIN_MESSAGES, _MAX_MESSAGES = 300, 1000  # messages; the many where one of the few was lost
MAX_LOST = 3  # packets
_EXCHANGE_TIMEOUT_S, _LOSSY_TIMEOUT_S = 2.0, 5.0  # seconds for the messages, and where too few were sent to tell

_STREAM = 8 << 20  # bytes
_STREAM_TIMES_S = 0.3, 2.5  # seconds, the more the longer a packet takes: TCP begins slowly
_FIRST_WINDOW = 14_000  # bytes that TCP sends before it hears from the other end; then it doubles
_FIRST = 1 << 16
_TICK = 0.004  # seconds: the kernel counts in steps like this

_REACH_BYTE, _ECHO_BYTE, _SINK_BYTE = b"r", b"e", b"s"

Outcome = Literal["ok", "refused", "silent", "unreachable", "stranger"]
"""How a try ended: "stranger" is another program that listens there."""


@dataclass(frozen=True)
class ListenReply:
    """Where a node listens."""

    any_port: Count  # one that the kernel chose, as gloo and NCCL take them
    taken: tuple[tuple[Count, TextLine], ...]  # ports where it cannot, and why


@dataclass(frozen=True)
class ConnectResult:
    """How it went."""

    outcome: Outcome
    seconds: Seconds | None = None  # there and back, of one byte


@dataclass(frozen=True)
class PingResult:
    """What became of small packets, as far as the kernel tells."""

    seconds: Seconds | None  # the shortest time there and back
    sent: Size
    lost: Size  # on the way there

    def __post_init__(self) -> None:
        if self.lost > self.sent:
            raise ValueError("more packets lost than sent")


@dataclass(frozen=True)
class StreamResult:
    """What became of a stream."""

    large: bool  # whether packets of full size arrive
    rate: NonNegativeFloat | None  # bytes a second


class TestListener:
    """Listens at all addresses of this machine until it is closed."""

    def __init__(self, ports: Sequence[int], nonce: str) -> None:
        self._nonce = nonce.encode()
        self._sockets: list[socket.socket] = []
        taken: dict[int, str] = {}
        any_port = 0
        for port in (*ports, 0):
            try:
                listening = listen_on_all_interfaces(port)
            except OSError as error:
                taken[port] = os.strerror(error.errno or 0)
                continue
            self._sockets.append(listening)
            any_port = listening.getsockname()[1]
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        self.listening = ListenReply(any_port, tuple(taken.items()))

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
            asked = _receive(connection, NONCE_BYTES + 1, SMALL_REPLY_TIMEOUT_S)
            if asked[:NONCE_BYTES] != self._nonce:
                return
            connection.sendall(self._nonce)
            connection.settimeout(_LOSSY_TIMEOUT_S)
            if asked[NONCE_BYTES:] == _ECHO_BYTE:
                _echo(connection)
            elif asked[NONCE_BYTES:] == _SINK_BYTE:
                _receive_stream(connection)


def _echo(connection: socket.socket) -> None:
    left = b""
    while data := connection.recv(4096):
        left += data
        while len(left) >= _MESSAGE:
            connection.send(left[:_MESSAGE])
            left = left[_MESSAGE:]


def _receive_stream(connection: socket.socket) -> None:
    """Say when the first bytes have come, and when all have."""
    room = bytearray(1 << 20)
    if connection.recv_into(room):
        connection.sendall(b"+")
        while connection.recv_into(room):
            pass
        connection.sendall(b".")


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES // 2)


def max_duration(count: int) -> float:
    """How many seconds so many tries take at most."""
    return (1 + count // _MAX_CONCURRENT) * MAX_ATTEMPTS * (CONNECT_TIMEOUT_S + SMALL_REPLY_TIMEOUT_S)


PING_TIMEOUT_S = MAX_ATTEMPTS * (CONNECT_TIMEOUT_S + SMALL_REPLY_TIMEOUT_S) + _LOSSY_TIMEOUT_S
STREAM_TIMEOUT_S = (
    MAX_ATTEMPTS * (CONNECT_TIMEOUT_S + SMALL_REPLY_TIMEOUT_S) + LARGE_REPLY_TIMEOUT_S + max(_STREAM_TIMES_S)
)


def test_paths(addresses: Sequence[tuple[str, int]], nonce: str) -> tuple[ConnectResult, ...]:
    """Try these ways, many at once."""
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        return tuple(pool.map(lambda place: _test_path(place, nonce.encode()), addresses))


def _test_path(place: tuple[str, int], nonce: bytes) -> ConnectResult:
    reached = _connect(place, nonce + _REACH_BYTE)
    if reached.connection:
        reached.connection.close()
    return reached.tried


class _ConnectAttempt(NamedTuple):
    tried: ConnectResult
    connection: socket.socket | None
    lost: int  # packets of tries without an answer


def _connect(place: tuple[str, int], words: bytes) -> _ConnectAttempt:
    """Connect and say these words, again where nobody answers."""
    lost = 0
    for _ in range(MAX_ATTEMPTS):
        try:
            connection = socket.create_connection(place, CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            return _ConnectAttempt(ConnectResult("refused"), None, lost)
        except TimeoutError:
            tried, lost = ConnectResult("silent"), lost + _SYNS
            continue
        except (OSError, ValueError):  # what a node says is its address may be none
            tried = ConnectResult("unreachable")
            continue
        began = time.monotonic()
        with suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(words)
            if _receive(connection, NONCE_BYTES, SMALL_REPLY_TIMEOUT_S) == words[:NONCE_BYTES]:
                return _ConnectAttempt(ConnectResult("ok", time.monotonic() - began), connection, lost)
        tried = ConnectResult("stranger")
        with connection:
            counts = _read_tcp_counters(connection)
        lost += counts.lost if counts else 0  # the node may have no time to answer
    return _ConnectAttempt(tried, None, lost)


# ---------------------------------------------------------------------------------------------------- what it carries


class _TcpCounters(NamedTuple):
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


def _read_tcp_counters(connection: socket.socket) -> _TcpCounters | None:
    """None where the kernel does not tell."""
    with suppress(OSError, AttributeError):
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        if len(told) == _COUNTS.size:
            return _TcpCounters(*_COUNTS.unpack(told))
    return None


def measure_ping(place: tuple[str, int], nonce: str) -> PingResult:
    """Exchange small packets with a node, a few at a time."""
    tried, connection, unheard = _connect(place, nonce.encode() + _ECHO_BYTE)
    if connection is None:
        return PingResult(None, unheard, unheard)
    with connection:
        sent = _exchange_messages(connection)
        counts = _read_tcp_counters(connection)
    if counts is None:
        return PingResult(tried.seconds, sent, unheard)
    sent = max(counts.packets, counts.lost)  # a lost SYN is no packet with data
    return PingResult(counts.round_trip / 1e6, sent + unheard, counts.lost + unheard)


def _exchange_messages(connection: socket.socket) -> int:
    """Return how many were sent: more where one was lost, and fewer where many are."""
    wanted, sent, came = _MIN_MESSAGES, 0, 0
    began = time.monotonic()
    with suppress(OSError):
        while came < wanted * _MESSAGE:
            passed, counts = time.monotonic() - began, _read_tcp_counters(connection)
            few_lost = counts is not None and 0 < counts.lost < MAX_LOST
            if passed > (_LOSSY_TIMEOUT_S if few_lost else _EXCHANGE_TIMEOUT_S):
                break
            while sent < wanted and sent * _MESSAGE - came < _WINDOW * _MESSAGE:
                connection.send(bytes(_MESSAGE))
                sent += 1
            connection.settimeout(_EXCHANGE_TIMEOUT_S / 4)
            with suppress(TimeoutError):
                if not (data := connection.recv(4096)):
                    break
                came += len(data)
            if counts is not None and counts.lost:
                wanted = _MAX_MESSAGES
    return sent


def measure_stream(place: tuple[str, int], nonce: str) -> StreamResult | None:
    """Send much at once, and no longer than a moment. None where no connection comes about."""
    connection = _connect(place, nonce.encode() + _SINK_BYTE).connection
    if connection is None:
        return None
    with connection:
        # What has not arrived at the end of the moment never will: nobody waits for it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        began = time.monotonic()
        try:
            connection.settimeout(LARGE_REPLY_TIMEOUT_S)
            connection.sendall(bytes(_FIRST))
            _receive(connection, 1, LARGE_REPLY_TIMEOUT_S)
        except (OSError, EOFError):
            return StreamResult(False, None)
        whole = _send_until_timeout(connection)
        seconds = time.monotonic() - began
        if (counts := _read_tcp_counters(connection)) is None:
            return StreamResult(True, _STREAM / seconds if whole else None)
        round_trip = counts.round_trip / 1e6
        slow_start = round_trip * log2(1 + counts.arrived / _FIRST_WINDOW)
        return StreamResult(True, counts.arrived / max(_TICK, counts.busy / 1e6 - slow_start))


def _send_until_timeout(connection: socket.socket) -> bool:
    """Whether all has arrived in time."""
    counts = _read_tcp_counters(connection)
    least, most = _STREAM_TIMES_S
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
    return read_exactly(connection, count, time.monotonic() + seconds)
