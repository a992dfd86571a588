"""Network tests between nodes: each node listens on ports, to which the others connect and send.

The first test sends a byte and waits for a reply. Others measure the quality of the path: small packets, whose losses
and round-trip times the kernel reports, and a stream that starts with packets of full size: a path that drops these
without an ICMP message lets small ones through (RFC 2923, "black hole detection").
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

from msgspec import Struct

from ddplaunch.base.frames import read_exactly
from ddplaunch.base.types import Count, NonNegativeFloat, Seconds, Size, TaggedMessage, TextLine
from ddplaunch.system.network.reserved_port import listen_on_all_interfaces

CONNECT_TIMEOUT_S = 3.5  # the kernel sends three SYNs or more meanwhile
SMALL_REPLY_TIMEOUT_S = 3.0
LARGE_REPLY_TIMEOUT_S = 3.0
MAX_ATTEMPTS = 2  # without an answer: if packets are lost, a second connection may succeed
NONCE_BYTES = 16  # of the secret that a node expects and no other program knows
_SYNS = 3  # packets lost with a connection that gets no answer
_MAX_CONCURRENT = 128

_MESSAGE = 32  # bytes, each in its own packet
_WINDOW = 8  # messages in flight: fewer than TCP's initial window, and too few to fill a queue
_MIN_MESSAGES, _MAX_MESSAGES = 300, 1000  # messages; the maximum if one of the first was lost
MAX_LOST = 3  # packets
_EXCHANGE_TIMEOUT_S, _LOSSY_TIMEOUT_S = 2.0, 5.0  # for the messages; longer if few of them were lost

_STREAM = 8 << 20  # bytes
_STREAM_TIMES_S = 0.3, 2.5  # least and most; longer for a longer round-trip time, because of slow start
_FIRST_WINDOW = 14_000  # TCP's initial window, in bytes; it doubles per round trip
_FIRST = 1 << 16
_TICK = 0.004  # seconds, the resolution of the kernel's counters

_REACH_BYTE, _ECHO_BYTE, _SINK_BYTE = b"r", b"e", b"s"

Outcome = Literal["ok", "refused", "silent", "unreachable", "stranger"]
"""How a connection attempt ended; "stranger": another program listens there."""


class ListenReply(TaggedMessage, frozen=True):
    """The ports on which a node listens."""

    any_port: Count  # one that the kernel chose, as gloo and NCCL take them
    taken: tuple[tuple[Count, TextLine], ...]  # ports on which it cannot listen, and why


class ConnectResult(Struct, frozen=True):
    """The result of one connection attempt."""

    outcome: Outcome
    seconds: Seconds | None = None  # round-trip time of one byte


class PingResult(TaggedMessage, frozen=True):
    """Round-trip time and losses of small packets, by the kernel's counters."""

    seconds: Seconds | None  # the shortest round-trip time
    sent: Size
    lost: Size  # in this direction

    def __post_init__(self) -> None:
        if self.lost > self.sent:
            raise ValueError("more packets lost than sent")


class StreamResult(Struct, frozen=True):
    """The result of sending a stream to a node: whether large packets arrive, and the throughput."""

    large: bool  # whether packets of full size arrive
    rate: NonNegativeFloat | None  # bytes per second


class TestListener:
    """Answers test connections on all addresses of this machine until it is closed."""

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
        """Stop listening."""
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
            request = _receive(connection, NONCE_BYTES + 1, SMALL_REPLY_TIMEOUT_S)
            if request[:NONCE_BYTES] != self._nonce:
                return
            connection.sendall(self._nonce)
            connection.settimeout(_LOSSY_TIMEOUT_S)
            if request[NONCE_BYTES:] == _ECHO_BYTE:
                _echo(connection)
            elif request[NONCE_BYTES:] == _SINK_BYTE:
                _receive_stream(connection)


def _echo(connection: socket.socket) -> None:
    pending = b""
    while data := connection.recv(4096):
        pending += data
        while len(pending) >= _MESSAGE:
            connection.send(pending[:_MESSAGE])
            pending = pending[_MESSAGE:]


def _receive_stream(connection: socket.socket) -> None:
    """Receive a stream: confirm its first bytes, and its end."""
    buffer = bytearray(1 << 20)
    if connection.recv_into(buffer):
        connection.sendall(b"+")
        while connection.recv_into(buffer):
            pass
        connection.sendall(b".")


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES // 2)


def max_connect_duration_s(count: int) -> float:
    """The longest time in seconds that ``count`` connection attempts can take."""
    return (1 + count // _MAX_CONCURRENT) * _ATTEMPTS_TIMEOUT_S


_ATTEMPTS_TIMEOUT_S = MAX_ATTEMPTS * (CONNECT_TIMEOUT_S + SMALL_REPLY_TIMEOUT_S)
PING_TIMEOUT_S = _ATTEMPTS_TIMEOUT_S + _LOSSY_TIMEOUT_S
STREAM_TIMEOUT_S = _ATTEMPTS_TIMEOUT_S + LARGE_REPLY_TIMEOUT_S + max(_STREAM_TIMES_S)


def try_connections(addresses: Sequence[tuple[str, int]], nonce: str) -> tuple[ConnectResult, ...]:
    """Test connections to these addresses, many at once."""
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        return tuple(pool.map(lambda address: _try_connection(address, nonce.encode()), addresses))


def _try_connection(address: tuple[str, int], nonce: bytes) -> ConnectResult:
    reached = _connect(address, nonce + _REACH_BYTE)
    if reached.connection:
        reached.connection.close()
    return reached.tried


class _ConnectAttempt(NamedTuple):
    tried: ConnectResult
    connection: socket.socket | None
    lost: int  # packets lost in attempts without an answer


def _connect(address: tuple[str, int], request: bytes) -> _ConnectAttempt:
    """Connect to an address and send ``request``; try again if there is no answer."""
    lost = 0
    for _ in range(MAX_ATTEMPTS):
        try:
            connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            return _ConnectAttempt(ConnectResult("refused"), None, lost)
        except TimeoutError:
            tried, lost = ConnectResult("silent"), lost + _SYNS
            continue
        except (OSError, ValueError):  # the address that a node reports may be invalid
            tried = ConnectResult("unreachable")
            continue
        began = time.monotonic()
        with suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            if _receive(connection, NONCE_BYTES, SMALL_REPLY_TIMEOUT_S) == request[:NONCE_BYTES]:
                return _ConnectAttempt(ConnectResult("ok", time.monotonic() - began), connection, lost)
        tried = ConnectResult("stranger")
        with connection:
            counts = _read_tcp_counters(connection)
        lost += counts.lost if counts else 0  # without losses the node may just have no time to answer
    return _ConnectAttempt(tried, None, lost)


# ---------------------------------------------------------------------------------------------------- quality of a path


class _TcpCounters(NamedTuple):
    """Counters of a connection, from fields of struct tcp_info (linux/tcp.h) that exist since Linux 4.19."""

    resent: int
    arrived: int  # bytes that the other end has acknowledged
    round_trip: int  # microseconds, the shortest; the kernel answers even if the program is busy
    packets: int  # with data, sent
    busy: int  # microseconds with unacknowledged data
    doubled: int  # retransmitted packets that the other end had already: not lost

    @property
    def lost(self) -> int:
        return max(0, self.resent - self.doubled)


_COUNTS = struct.Struct("=100xI16xQ20xI4xI8xQ40xI")


def _read_tcp_counters(connection: socket.socket) -> _TcpCounters | None:
    """Read the counters of a TCP connection; None if the kernel does not provide them."""
    with suppress(OSError, AttributeError):
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        if len(data) == _COUNTS.size:
            return _TcpCounters(*_COUNTS.unpack(data))
    return None


def measure_ping(address: tuple[str, int], nonce: str) -> PingResult:
    """Exchange small packets with a node, a few at a time."""
    tried, connection, unanswered = _connect(address, nonce.encode() + _ECHO_BYTE)
    if connection is None:
        return PingResult(None, unanswered, unanswered)
    with connection:
        sent = _exchange_messages(connection)
        counts = _read_tcp_counters(connection)
    if counts is None:
        return PingResult(tried.seconds, sent, unanswered)
    sent = max(counts.packets, counts.lost)  # a lost SYN does not count as a packet with data
    return PingResult(counts.round_trip / 1e6, sent + unanswered, counts.lost + unanswered)


def _exchange_messages(connection: socket.socket) -> int:
    """Exchange small packets, more if a packet was lost, fewer if many were; return how many were sent."""
    target_count, sent, came = _MIN_MESSAGES, 0, 0
    began = time.monotonic()
    with suppress(OSError):
        while came < target_count * _MESSAGE:
            passed, counts = time.monotonic() - began, _read_tcp_counters(connection)
            few_lost = counts is not None and 0 < counts.lost < MAX_LOST
            if passed > (_LOSSY_TIMEOUT_S if few_lost else _EXCHANGE_TIMEOUT_S):
                break
            while sent < target_count and sent * _MESSAGE - came < _WINDOW * _MESSAGE:
                connection.send(bytes(_MESSAGE))
                sent += 1
            connection.settimeout(_EXCHANGE_TIMEOUT_S / 4)
            with suppress(TimeoutError):
                if not (data := connection.recv(4096)):
                    break
                came += len(data)
            if counts is not None and counts.lost:
                target_count = _MAX_MESSAGES
    return sent


def measure_stream(address: tuple[str, int], nonce: str) -> StreamResult | None:
    """Send a stream for a limited time; None without a connection."""
    connection = _connect(address, nonce.encode() + _SINK_BYTE).connection
    if connection is None:
        return None
    with connection:
        # Unsent data is discarded at close: nothing waits for it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        began = time.monotonic()
        try:
            connection.settimeout(LARGE_REPLY_TIMEOUT_S)
            connection.sendall(bytes(_FIRST))
            _receive(connection, 1, LARGE_REPLY_TIMEOUT_S)
        except (OSError, EOFError):
            return StreamResult(False, None)
        completed = _send_rest_of_stream(connection)
        seconds = time.monotonic() - began
        if (counts := _read_tcp_counters(connection)) is None:
            return StreamResult(True, _STREAM / seconds if completed else None)
        round_trip = counts.round_trip / 1e6
        slow_start = round_trip * log2(1 + counts.arrived / _FIRST_WINDOW)
        return StreamResult(True, counts.arrived / max(_TICK, counts.busy / 1e6 - slow_start))


def _send_rest_of_stream(connection: socket.socket) -> bool:
    """Send the rest of the stream; return whether all of it arrived in time."""
    counts = _read_tcp_counters(connection)
    least, most = _STREAM_TIMES_S
    deadline = time.monotonic() + min(most, max(least, 20e-6 * counts.round_trip if counts else 0.0))
    chunk, remaining = bytes(1 << 18), _STREAM - _FIRST
    try:
        while remaining > 0:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            remaining -= connection.send(chunk)
            if time.monotonic() > deadline:
                return False
        connection.shutdown(socket.SHUT_WR)
        return _receive(connection, 1, deadline - time.monotonic()) == b"."
    except (OSError, EOFError):
        return False


def _receive(connection: socket.socket, count: int, seconds: float) -> bytes:
    """Receive exactly ``count`` bytes. Raises OSError, also for a timeout, or EOFError."""
    return read_exactly(connection, count, time.monotonic() + seconds)
