"""Length-prefixed frames on a stream socket: four bytes of length, then the body.

Zygotes and ranks, which import the standard library only, have a form of their own: ``core/rank/zygote_channel.py``.
"""

from __future__ import annotations

import math
import socket
import struct
import time

LENGTH = struct.Struct("!I")
_CHUNK = 1 << 18


class ProtocolError(Exception):
    """A message that is malformed, or comes at the wrong time."""


def encode_frame(body: bytes) -> bytes:
    """Return the frame of a message body: its length in four bytes, then the body."""
    return LENGTH.pack(len(body)) + body


def read_frame(sock: socket.socket, max_bytes: int, deadline: float = math.inf) -> bytes:
    """Wait for one frame, until ``deadline`` on the monotonic clock, and return its body.

    Raises:
        EOFError: the peer has closed the connection.
        ProtocolError: it is longer than ``max_bytes``.
        TimeoutError: it did not come in time.
    """
    (length,) = LENGTH.unpack(read_exactly(sock, LENGTH.size, deadline))
    if length > max_bytes:
        raise ProtocolError("a frame that is too long")
    return read_exactly(sock, length, deadline)


def read_exactly(sock: socket.socket, count: int, deadline: float = math.inf) -> bytes:
    """Read exactly ``count`` bytes until ``deadline``; without a deadline, the socket's own timeout applies."""
    data = bytearray()
    while len(data) < count:
        if deadline < math.inf:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
        if not (got := sock.recv(min(count - len(data), _CHUNK))):
            raise EOFError
        data += got
    return bytes(data)
