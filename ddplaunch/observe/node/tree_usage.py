"""Usage counters of the ranks' process trees: CPU time, bytes of files and of the network, from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.observe.node.tcp_connections import TcpConnection, list_connections, list_socket_inodes
from ddplaunch.system.devices.process_usage import read_io
from ddplaunch.system.processes.proc_utils import read_stat

_LOOPS = (b"gloo_tcp_loop", b"pt_gloo_runloop")  # the names of gloo's threads
_TICK = os.sysconf("SC_CLK_TCK")


class ThreadTime(NamedTuple):
    """What one thread has used, and how long it was ready to run while others had the CPUs (proc(5), schedstat)."""

    cpu_s: float
    waited_s: float


class TreeUsage(NamedTuple):
    """Usage of a process and its descendants, including children that have ended."""

    cpu_s: float  # seconds
    bytes_transferred: int  # read and written: files, pipes and disks; not send and recv
    network: Mapping[int, int] = {}  # bytes of each TCP connection to outside the job, by inode
    threads: Mapping[int, ThreadTime] = {}  # of the threads that run now, by thread id, without gloo's threads


def read_tree_usage(roots: Collection[int], store: int = 0) -> dict[int, TreeUsage]:
    """Add up the usage of each of these processes and its descendants; processes that are gone are omitted.

    ``store``: the port of the job's store; connections to it, and between these processes, are inside the job.
    One walk through /proc takes 10 to 20 µs per process of the machine.
    """
    parents: dict[int, int] = {}
    cpu: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := read_stat(name)):
            parents[int(name)] = int(fields[1])
            cpu[int(name)] = sum(map(int, fields[11:15])) / _TICK
    usages = {root: TreeUsage(0.0, 0) for root in roots if root in cpu}
    held: dict[int, int] = {}  # which root has a connection, by inode
    for pid, seconds in cpu.items():
        above = pid
        while above not in usages and above in parents:
            above = parents[above]
        if above in usages:
            so_far = usages[above]
            threads, idle_s = _read_threads(pid, has_loops=pid == above)
            usages[above] = TreeUsage(
                so_far.cpu_s + max(0.0, seconds - idle_s),
                so_far.bytes_transferred + sum(read_io(pid)),
                threads={**so_far.threads, **threads},
            )
            held.update((each, above) for each in list_socket_inodes(pid))
    for connection in _external_connections(held, store):
        network = usages[held[connection.inode]].network
        usages[held[connection.inode]] = usages[held[connection.inode]]._replace(
            network={**network, connection.inode: connection.bytes_transferred}
        )
    return usages


def withheld_cpu_s(before: TreeUsage, now: TreeUsage, seconds: float) -> float:
    """CPU seconds that threads would have used in the time that they waited for a CPU, on a machine with load.

    A thread that computes half of the time in which it need not wait would compute half of its waiting time too. One
    that only polls waits as long at each wake-up, but would have used next to nothing.
    """
    withheld = 0.0
    for thread, last in now.threads.items():
        first = before.threads.get(thread, ThreadTime(0.0, 0.0))
        used, waited = last.cpu_s - first.cpu_s, last.waited_s - first.waited_s
        if used > 0 and waited > 0:
            withheld += min(waited, used * waited / max(seconds - waited, used))
    return withheld


def _read_threads(pid: int, *, has_loops: bool) -> tuple[dict[int, ThreadTime], float]:
    """Return the times of a process's threads except gloo's, and the CPU seconds of gloo's threads.

    A process group has two or three, which wake up without any work. What they do for a collective or a send is not
    progress of the rank either: another rank waits for it.
    """
    found: dict[int, ThreadTime] = {}
    idle_s = 0.0  # ticks of hundreds of threads, each rounded down, would be wrong by more than a rank uses
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            with suppress(OSError, ValueError, IndexError):
                with open(f"{thread.path}/schedstat", "rb") as file:
                    used, waited = (int(word) / 1e9 for word in file.read().split()[:2])
                if has_loops and _is_gloo_thread(thread.path):
                    idle_s += used
                else:
                    found[int(thread.name)] = ThreadTime(used, waited)
    return found, idle_s


def _is_gloo_thread(path: str) -> bool:
    with open(f"{path}/comm", "rb") as name:
        return name.read().strip() in _LOOPS


def _external_connections(held: Collection[int], store: int) -> list[TcpConnection]:
    """The connections of the ranks, except those between them on this node and those to the store."""
    connections = {each.endpoints: each for each in list_connections() if each.inode in held} if held else {}
    return [
        each
        for each in connections.values()
        if (each.endpoints[1], each.endpoints[0]) not in connections
        and store not in (each.endpoints[0][1], each.endpoints[1][1])
    ]
