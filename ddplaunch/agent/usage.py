"""What the ranks' process trees have used so far: CPU time, and bytes read and written, as the kernel counts them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """That of a process and its descendants, with what their children used that have ended."""

    cpu: float  # seconds
    moved: int  # bytes read and written, to files, pipes and disks; the kernel does not count send and recv


def usage(roots: Collection[int]) -> dict[int, Usage]:
    """Add up what each of these processes and its descendants have used; those that are gone are left out.

    One walk through /proc, 10 to 20 µs for each process of the machine.
    """
    parents: dict[int, int] = {}
    cpu: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        cpu[int(name)] = sum(map(int, fields[11:15])) / _TICK
    found = {root: Usage(0.0, 0) for root in roots if root in cpu}
    for pid, seconds in cpu.items():
        above = pid
        while above not in found and above in parents:
            above = parents[above]
        if above in found:
            so_far = found[above]
            found[above] = Usage(so_far.cpu + seconds, so_far.moved + _moved(pid))
    return found


def _moved(pid: int) -> int:
    """Bytes (proc_pid_io(5)); pages of a mapped file are in ``read_bytes`` alone."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            values = dict(line.split(b": ") for line in file.read().splitlines())
        return sum(int(values[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
    except (OSError, ValueError, KeyError):
        return 0
