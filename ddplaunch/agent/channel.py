"""Messages between the supervisor and its zygote: JSON objects on a stream socket, descriptors travelling along.

Loaded by the zygote too, so: standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 16


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets duplicates of ``fds``, in order."""
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if fds:
        sent = socket.send_fds(sock, [header], list(fds))
        sock.sendall(header[sent:] + body)
    else:
        sock.sendall(header + body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for one whole message and its descriptors.

    Raises:
        EOFError: the other end has closed.
    """
    header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, _MOST_DESCRIPTORS)
    header += _exactly(sock, _LENGTH.size - len(header)) if header else b""
    if not header:
        raise EOFError
    return json.loads(_exactly(sock, _LENGTH.unpack(header)[0])), list(fds)


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = sock.recv(min(size, 1 << 16))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
