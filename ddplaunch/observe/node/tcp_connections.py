"""The TCP connections of this machine, by sock_diag(7), which needs no privileges; and the sockets of a process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_SOCK_DIAG = 4  # a netlink protocol; its constants: linux/sock_diag.h, inet_diag.h, tcp.h
_BY_FAMILY = 20
_REQUEST, _DUMP = 0x01, 0x300
_DONE, _ERROR = 3, 2
_ESTABLISHED = 1 << 1
_INFO = 2
_MAPPED = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address in an IPv6 socket
_MAX_CONNECTIONS = 50_000  # more than jobs have; each costs 10 µs

Endpoint = tuple[bytes, int]  # address and port


class TcpConnection(NamedTuple):
    """One end of an established connection."""

    inode: int  # the inode of the socket
    endpoints: tuple[Endpoint, Endpoint]  # local and remote
    bytes_transferred: int  # sent and acknowledged, plus received


def list_connections(port: int = 0) -> list[TcpConnection]:
    """List all connections, or those to ``port``; at most ``_MAX_CONNECTIONS``, none without support of the kernel."""
    connections: list[TcpConnection] = []
    with (
        suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink_socket,
    ):
        for family in (socket.AF_INET, socket.AF_INET6):
            head = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
            wanted = head + struct.pack(">HH44x", 0, port)
            netlink_socket.send(struct.pack("=IHHII", 16 + len(wanted), _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + wanted)
            for message in _read_netlink(netlink_socket):
                connections.append(_parse_connection(message))
                if len(connections) >= _MAX_CONNECTIONS:
                    return connections
    return connections


def list_socket_inodes(pid: int) -> Iterator[int]:
    """The inodes of the sockets that a process has open."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for descriptor in descriptors:
            with suppress(OSError, ValueError):
                kind, _, number = os.readlink(descriptor.path).partition(":[")
                if kind == "socket":
                    yield int(number[:-1])


def _read_netlink(netlink_socket: socket.socket) -> Iterator[bytes]:
    while True:
        data = netlink_socket.recv(1 << 17)
        while len(data) >= 16:
            length, kind = struct.unpack_from("=IH", data)
            if kind in (_DONE, _ERROR) or length < 16:
                return
            yield data[16:length]
            data = data[(length + 3) & ~3 :]


def _parse_connection(message: bytes) -> TcpConnection:
    own, other = struct.unpack_from(">HH", message, 4)
    ends = (_normalize_address(message[8:24], message[0]), own), (_normalize_address(message[24:40], message[0]), other)
    (number,) = struct.unpack_from("=I", message, 68)
    moved, at = 0, 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length >= 4 + 136:  # tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1
            moved = sum(struct.unpack_from("=QQ", message, at + 4 + 120))
        at += max(4, (length + 3) & ~3)
    return TcpConnection(number, ends, moved)


def _normalize_address(raw: bytes, family: int) -> bytes:
    """Return four or sixteen bytes, equal on both ends even if one is an IPv4 and the other an IPv6 socket."""
    return raw[:4] if family == socket.AF_INET else raw.removeprefix(_MAPPED)


def peer_address(connection: TcpConnection) -> str:
    """Format the remote address: "10.0.0.7:443"."""
    address, port = connection.endpoints[1]
    if len(address) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, address)}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{port}"
