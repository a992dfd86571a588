"""The memory control groups of this process, versions 1 and 2 (cgroups(7)): limits, usage, OOM kills."""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.system.devices.sysfs import Folder, read_int, read_text

_NO_LIMIT = 1 << 60  # version 1 shows about 2**63 for "unlimited"
_USAGE_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""File of the limit -> file of the usage."""


class Cgroup(Struct, frozen=True):
    """The memory of one control group and those below it."""

    path: str
    name: str  # as in /proc/self/cgroup
    setting: str  # name of the file with its limit
    limit: int | None  # bytes
    limit_hits: int  # how often the limit was reached
    oom_kills: int | None  # processes killed because of that; None if not counted


def list_cgroup_dirs(controller: str, root: str = "", sysfs: Folder = "/sys", proc: Folder = "/proc") -> Iterator[str]:
    """Yield the folders of this process's control group and its ancestors, of version 2 and of a version 1 controller.

    ``root``: the folder with /proc and /sys.
    """
    for line in (read_text(f"{root}{proc}/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path or (controllers and controller not in controllers.split(",")):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        top = f"{root}{sysfs}/fs/cgroup"
        together = f"{top}/{controllers}"  # of several controllers, to which version 1 has a link for each
        version_1 = (together if os.path.isdir(together) else f"{top}/{controller}",)
        for folder in version_1 if controllers else (top, f"{top}/unified"):  # "unified": version 2 next to version 1
            for depth in range(len(parts), -1, -1):
                yield "/".join((folder, *parts[:depth]))


def read_cgroups(root: str = "") -> list[Cgroup]:
    """Read this process's control group and its ancestors."""
    cgroups = []
    for folder in list_cgroup_dirs("memory", root):
        name = folder.removeprefix(f"{root}/sys/fs/cgroup").removeprefix("/memory") or "/"
        if limit := read_text(f"{folder}/memory.max"):
            happened = read_counters(f"{folder}/memory.events")  # includes descendants
            # At a parent's limit, its "oom" is incremented, and "oom_kill" in the group of the killed process.
            met = (read_counters(f"{folder}/memory.events.local") or happened).get("oom", 0)
            limited = int(limit) if limit.isdecimal() else None
            cgroups.append(Cgroup(folder, name, "memory.max", limited, met, happened.get("oom_kill")))
        elif (size := read_int(f"{folder}/memory.limit_in_bytes")) is not None:
            met = read_int(f"{folder}/memory.failcnt") or 0
            kills = read_counters(f"{folder}/memory.oom_control").get("oom_kill")
            limited = size if size < _NO_LIMIT else None
            cgroups.append(Cgroup(folder, name, "memory.limit_in_bytes", limited, met, kills))
    return cgroups


def apply_memory_limits(total: int | None, available: int | None) -> tuple[int | None, int | None]:
    """Apply the limits of control groups to the machine's memory; the page cache counts as available."""
    for group in read_cgroups():
        used = read_int(f"{group.path}/{_USAGE_FILES[group.setting]}")
        if group.limit is None or used is None:
            continue
        stat = read_counters(f"{group.path}/memory.stat")
        cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        left = max(0, group.limit - max(0, used - cached))
        total = group.limit if total is None else min(total, group.limit)
        available = left if available is None else min(available, left)
    return total, available


def read_shared_and_cache(group: Cgroup) -> tuple[int, int]:
    """Return the bytes of shared memory and of page cache in a control group and those below it."""
    stat = read_counters(f"{group.path}/memory.stat")
    shared = stat.get("total_shmem", stat.get("shmem", 0))
    return shared, max(0, stat.get("total_cache", stat.get("file", 0)) - shared)


def read_counters(path: str) -> dict[str, int]:
    """Read a file of lines with a name and a number; empty if it cannot be read."""
    pairs = (line.split() for line in (read_text(path) or "").splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}
