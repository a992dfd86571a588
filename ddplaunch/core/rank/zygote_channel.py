"""Blocking messages on the zygote socket: length-prefixed JSON objects on a stream socket, with attached descriptors.

For the zygote's side; the launcher's side is non-blocking (``core/agent/zygote_socket.py``).
"""

from __future__ import annotations

import json
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddplaunch.core.rank.zygote_messages import ToZygote

HEADER = struct.Struct("!I")
MAX_DESCRIPTORS = 16


def encode_message(message: Mapping[str, object]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def send_message(sock: socket.socket, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets duplicates of ``fds``, in order."""
    data = encode_message(message)
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):  # even an empty send fails if the peer has read everything and closed
        sock.sendall(data[sent:])


def receive_message(sock: socket.socket) -> tuple[ToZygote, list[int]]:
    """Wait for one message and its descriptors; fewer than were sent if RLIMIT_NOFILE was reached.

    Raises EOFError if the peer has closed.
    """
    header, fds, _, _ = socket.recv_fds(sock, HEADER.size, MAX_DESCRIPTORS)
    if not header:
        raise EOFError
    header += _receive_exactly(sock, HEADER.size - len(header))
    request: ToZygote = json.loads(_receive_exactly(sock, HEADER.unpack(header)[0]))
    return request, fds


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
