"""What a rank's main thread waits for on a TCP connection, as the kernel tells: no frame of Python's names that."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

from ddplaunch.agent.connections import Connection, connections

STORE = "store"
_POLLS = {"x86_64": (7, 271), "aarch64": (73,)}.get(os.uname().machine, ())  # poll, ppoll: syscalls(2)
_READS = {"x86_64": (0, 45, 47), "aarch64": (63, 207, 212)}.get(os.uname().machine, ())  # read, recvfrom, recvmsg


def awaited(pids: Mapping[int, int], store: int) -> dict[int, str]:
    """What ranks wait for, whose processes are ``pids``: "store", on the port of that name, or "10.0.0.7:443"."""
    sockets = {rank: number for rank, pid in pids.items() if (number := _socket(pid))}
    found: dict[int, str] = {}
    if sockets and store:
        ends = {each.number for each in connections(store)}
        found = {rank: STORE for rank, number in sockets.items() if number in ends}
    if len(found) < len(sockets):
        every = {each.number: each for each in connections()}
        found |= {rank: _named(every[n]) for rank, n in sockets.items() if rank not in found and n in every}
    return found


def _socket(pid: int) -> int | None:
    """The number of the socket that its main thread waits on, alone; None where it does not, or we may not know."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call, *words = file.read().split()
        if not call.isdigit():
            return None  # it runs
        first, second = int(words[0], 16), int(words[1], 16)
        if int(call) in _POLLS and second == 1:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                (first,) = struct.unpack("=i", os.pread(memory, 4, first))
            finally:
                os.close(memory)
        elif int(call) not in _READS:
            return None
        kind, _, number = os.readlink(f"/proc/{pid}/fd/{first}").partition(":[")
        return int(number[:-1]) if kind == "socket" else None
    except (OSError, ValueError, IndexError, struct.error):
        return None


def _named(connection: Connection) -> str:
    address, port = connection.ends[1]
    if len(address) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, address)}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{port}"
