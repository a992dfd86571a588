"""Finds the system calls in which the main threads of ranks sleep, and what they wait for; Python stacks lack that.

Reading /proc/PID/syscall takes 15 µs per rank; the arguments of the call are read only if the rank sleeps in it.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.observe.diagnosis.rank_position import GLOO_TEARDOWN
from ddplaunch.observe.node.tcp_connections import list_connections, peer_address

STORE = "store"
ASLEEP, FILE_LOCK = "asleep", "waits for a file lock"
_INPUT, _FIFO = "waits for input", "waits for the other end of a fifo"
_CHILD = "waits for a child process"
_SIGNAL = "waits for a signal"

_POLLS, _READS, _FCNTL, _LOCKS, _WORDS = {  # syscalls(2); asm/unistd_64.h, asm-generic/unistd.h
    "x86_64": (
        (7, 271),  # poll, ppoll
        (0, 45, 47),  # read, recvfrom, recvmsg
        72,
        (72, 73),  # fcntl, flock
        {
            202: ASLEEP,
            449: ASLEEP,
            34: _SIGNAL,
            128: _SIGNAL,
            130: _SIGNAL,
            2: _FIFO,
            257: _FIFO,
            61: _CHILD,
            247: _CHILD,
        },
    ),
    "aarch64": (
        (73,),
        (63, 207, 212),
        25,
        (25, 32),
        {98: ASLEEP, 449: ASLEEP, 133: _SIGNAL, 137: _SIGNAL, 56: _FIFO, 260: _CHILD, 95: _CHILD},
    ),
}.get(os.uname().machine, ((), (), -1, (), {}))
_PAUSES = {"x86_64": (34, 130), "aarch64": (133,)}.get(os.uname().machine, ())  # pause, rt_sigsuspend
_PPOLL = {"aarch64": 73}.get(os.uname().machine)  # without descriptors, it is pause()
_SETLKW = (7, 38)  # F_SETLKW, F_OFD_SETLKW
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_GLOO_THREAD = "pt_gloo_runloop\n"


class BlockingCall(NamedTuple):
    """The system call that the main thread of a rank sleeps in."""

    description: str = ""  # "waits for a file lock"; "asleep" if the call does not show for what; "" if unknown
    awaits: str = ""  # the peer of a connection: "store" is the job's, or "10.0.0.7:443"
    holder: int | None = None  # the rank that holds the lock it waits for


def read_blocking_calls(pids: Mapping[int, int], store: int) -> dict[int, BlockingCall]:
    """Read the system call that each rank's main thread sleeps in; ``store``: the port of the job's store."""
    sleeps: dict[int, BlockingCall] = {}
    sockets: dict[int, int] = {}
    for rank, pid in pids.items():
        words, socket = _call(pid)
        if words:
            sleeps[rank] = BlockingCall(words)
        if socket:
            sockets[rank] = socket
    if sockets and store:
        ends = {each.inode for each in list_connections(store)}
        sleeps |= {rank: BlockingCall(awaits=STORE) for rank, number in sockets.items() if number in ends}
    if left := {rank: number for rank, number in sockets.items() if rank not in sleeps}:
        every = {each.inode: each for each in list_connections()}
        sleeps |= {rank: BlockingCall(awaits=peer_address(every[n])) for rank, n in left.items() if n in every}
    if any(each.description == FILE_LOCK for each in sleeps.values()):
        ranks = {pid: rank for rank, pid in pids.items()}
        holders = _lock_holders()
        for rank, each in sleeps.items():
            if each.description == FILE_LOCK and (holder := ranks.get(holders.get(pids[rank], 0))) not in (None, rank):
                sleeps[rank] = each._replace(holder=holder)
    return sleeps


def ends_at_any_signal(pid: int) -> bool:
    """Whether the main thread of a process is in a system call that ends when a signal is handled, like ``pause``."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/syscall", encoding="ascii") as file:
        call, *words = file.read().split()
        return call.isdigit() and (int(call) in _PAUSES or (int(call) == _PPOLL and words[1:3] == ["0x0", "0x0"]))
    return False


def _call(pid: int) -> tuple[str, int]:
    """Describe the system call of a main thread; if it waits for a single socket, also return its inode, else 0."""
    with suppress(OSError, ValueError, IndexError, struct.error):
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call, *words = file.read().split()
        if not call.isdigit():
            return "", 0  # "running"
        number, first, second = int(call), int(words[0], 16), int(words[1], 16)
        if number in _LOCKS and (number != _FCNTL or second in _SETLKW):
            return FILE_LOCK, 0
        if number == _FUTEX and _is_gloo_thread(pid, int(words[2], 16)):
            return GLOO_TEARDOWN, 0
        if number in _POLLS and second == 1:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                (first,) = struct.unpack("=i", os.pread(memory, 4, first))
            finally:
                os.close(memory)
        elif number not in _READS:
            return _WORDS.get(number, ""), 0
        path = f"/proc/{pid}/fd/{first}"
        kind, _, inode = os.readlink(path).partition(":[")
        if kind == "socket":
            return "", int(inode[:-1])
        mode = os.stat(path).st_mode
        return _INPUT if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) else "", 0
    return "", 0


def _is_gloo_thread(pid: int, value: int) -> bool:
    """Whether a futex call with this value joins a thread of gloo: ``pthread_join`` waits on its thread id."""
    with suppress(OSError), open(f"/proc/{pid}/task/{value}/comm", encoding="utf-8", errors="replace") as file:
        return value != pid and file.read() == _GLOO_THREAD
    return False


def _lock_holders() -> dict[int, int]:
    """Map each process that waits for a file lock to the process that holds the lock (proc_locks(5)).

    A waiter's line has an arrow, and the number of the holder's line above it.
    """
    found: dict[int, int] = {}
    with suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="ascii") as file:
        holders: dict[str, int] = {}
        for line in file:
            number, *words = line.split()
            if words[0] == "->":
                found[int(words[4])] = holders.get(number, 0)
            else:
                holders[number] = int(words[3])
    return found
