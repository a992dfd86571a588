"""Usage counters of the ranks' process trees: CPU time, bytes of files and of the network, from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.features.inspect.node.tcp_connections import TcpConnection, list_connections, list_socket_inodes
from ddplaunch.system.devices.process_usage import read_io
from ddplaunch.system.processes.proc_utils import read_stat

_LOOPS = (b"gloo_tcp_loop", b"pt_gloo_runloop")  # the names of gloo's threads
_TICK = os.sysconf("SC_CLK_TCK")


class TreeUsage(NamedTuple):
    """Usage of a process and its descendants, including children that have ended."""

    cpu_s: float  # seconds
    bytes_transferred: int  # read and written: files, pipes and disks; not send and recv
    network: Mapping[int, int] = {}  # bytes of each TCP connection to outside the job, by inode


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
    for root in roots:
        if root in cpu:
            cpu[root] = max(0.0, cpu[root] - _read_idle_loop_cpu_s(root))
    found = {root: TreeUsage(0.0, 0) for root in roots if root in cpu}
    held: dict[int, int] = {}  # which root has a connection, by inode
    for pid, seconds in cpu.items():
        above = pid
        while above not in found and above in parents:
            above = parents[above]
        if above in found:
            so_far = found[above]
            found[above] = TreeUsage(so_far.cpu_s + seconds, so_far.bytes_transferred + sum(read_io(pid)))
            held.update((each, above) for each in list_socket_inodes(pid))
    for each in _external_connections(held, store):
        network = found[held[each.inode]].network
        found[held[each.inode]] = found[held[each.inode]]._replace(
            network={**network, each.inode: each.bytes_transferred}
        )
    return found


def _read_idle_loop_cpu_s(pid: int) -> float:
    """CPU seconds of gloo's threads in a process: two or three per group, which wake up without any work.

    What they do for a collective or a send is not progress of the rank either: another rank waits for it.
    """
    nanoseconds = 0  # ticks of hundreds of threads, each rounded down, would be wrong by more than a rank uses
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            with suppress(OSError, ValueError, IndexError), open(f"{thread.path}/comm", "rb") as name:
                if name.read().strip() in _LOOPS:
                    with open(f"{thread.path}/schedstat", "rb") as file:
                        nanoseconds += int(file.read().split()[0])
    return nanoseconds / 1e9


def _external_connections(held: Collection[int], store: int) -> list[TcpConnection]:
    """The connections of the ranks, except those between them on this node and those to the store."""
    connections = {each.endpoints: each for each in list_connections() if each.inode in held} if held else {}
    return [
        each
        for each in connections.values()
        if (each.endpoints[1], each.endpoints[0]) not in connections
        and store not in (each.endpoints[0][1], each.endpoints[1][1])
    ]
