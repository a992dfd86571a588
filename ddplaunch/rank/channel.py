"""Messages between the supervisor and its zygote: JSON objects on a stream socket, descriptors travelling along.

What waits here is the zygote; the supervisor has a ``Mailbox``.
"""

from __future__ import annotations

import json
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.rank.messages import FromWarm, FromZygote, ToWarm, ToZygote

HEADER = struct.Struct("!I")
MAX_DESCRIPTORS = 16


def encode_message(message: ToZygote | FromZygote | ToWarm | FromWarm) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def send_message(sock: socket.socket, message: FromZygote | ToWarm | FromWarm, fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets duplicates of ``fds``, in order."""
    data = encode_message(message)
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):  # to send nothing fails, too, where the other end has read all and closed
        sock.sendall(data[sent:])


def receive_message(sock: socket.socket) -> tuple[ToZygote, list[int]]:
    """Wait for one whole message and its descriptors, fewer than were sent where our limit of open files cut in.

    Raises:
        EOFError: the other end has closed.
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
