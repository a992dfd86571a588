"""The control groups that we are in, and what they say of memory: limits, use, how often the kernel ended a process.

Of version 1 and 2 (cgroups(7)).
"""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.dataclass import dataclass
from ddplaunch.devices.sysfs import read_int, read_text

_NO_LIMIT = 1 << 60  # what version 1 has for "unlimited" is about 2**63
_USAGE_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The files of what is used, by those of the limits."""


@dataclass(frozen=True)
class Cgroup:
    """The memory of one control group and those below it."""

    path: str
    name: str  # as /proc/self/cgroup has it
    setting: str  # the file of its limit
    limit: int | None  # bytes
    limit_hits: int  # how often a process needed more than the limit
    oom_kills: int | None  # how many of its processes were ended for that; None where it does not count them


def list_cgroup_dirs(controller: str, root: str = "") -> Iterator[str]:
    """The folders of our control group and of those around it: of version 2, and of this controller of version 1.

    ``root`` is where /proc and /sys are.
    """
    for line in (read_text(f"{root}/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not path or (controllers and controller not in controllers.split(",")):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for top in (f"/{controller}",) if controllers else ("", "/unified"):  # the latter beside version 1
            for depth in range(len(parts), -1, -1):
                yield "/".join((f"{root}/sys/fs/cgroup{top}", *parts[:depth]))


def read_cgroups(root: str = "") -> list[Cgroup]:
    """Our control group, and those around it."""
    found = []
    for folder in list_cgroup_dirs("memory", root):
        name = folder.removeprefix(f"{root}/sys/fs/cgroup").removeprefix("/memory") or "/"
        if limit := read_text(f"{folder}/memory.max"):
            happened = read_counters(f"{folder}/memory.events")  # of those below, too
            # Where a parent's limit was met, "oom" rises there; "oom_kill" in the group of the process that was ended.
            met = (read_counters(f"{folder}/memory.events.local") or happened).get("oom", 0)
            limited = int(limit) if limit.isdecimal() else None
            found.append(Cgroup(folder, name, "memory.max", limited, met, happened.get("oom_kill")))
        elif (size := read_int(f"{folder}/memory.limit_in_bytes")) is not None:
            met = read_int(f"{folder}/memory.failcnt") or 0
            kills = read_counters(f"{folder}/memory.oom_control").get("oom_kill")
            limited = size if size < _NO_LIMIT else None
            found.append(Cgroup(folder, name, "memory.limit_in_bytes", limited, met, kills))
    return found


def available_memory(total: int | None, available: int | None) -> tuple[int | None, int | None]:
    """The memory of the machine, or what a control group leaves of it; files that are only cached count as free."""
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
    """Bytes of shared memory and of files that its processes hold in memory, those below it too."""
    stat = read_counters(f"{group.path}/memory.stat")
    shared = stat.get("total_shmem", stat.get("shmem", 0))
    return shared, max(0, stat.get("total_cache", stat.get("file", 0)) - shared)


def read_counters(path: str) -> dict[str, int]:
    """A file of lines of a name and a number; nothing where it cannot be read."""
    pairs = (line.split() for line in (read_text(path) or "").splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}
