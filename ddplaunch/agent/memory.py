"""Memory that this process may use: the machine's, or what the control groups around us leave of it."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.agent.limits import cgroups
from ddplaunch.devices.sysfs import read_text

_NO_LIMIT = 1 << 60  # what version 1 of control groups has for "unlimited" is about 2**63


def number(path: str) -> int | None:
    try:
        return int(read_text(path) or "")
    except ValueError:  # "max" too
        return None


def groups(controller: str) -> Iterator[str]:
    """The folders of our control group and of those around it: of version 2, and of this controller of version 1."""
    for controllers, path in cgroups():
        if controllers and controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield "/".join((root, *parts[:depth]))


def memory(total: int | None, available: int | None) -> tuple[int | None, int | None]:
    """The memory of the machine, or what a control group leaves of it; files that are only cached count as free."""
    for folder in groups("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = number(f"{folder}/{limit_name}"), number(f"{folder}/{used_name}")
            if limit is None or used is None or limit > _NO_LIMIT:
                continue
            cached = 0
            for line in (read_text(f"{folder}/memory.stat") or "").splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "active_file"):
                    cached += int(value)
            left = max(0, limit - max(0, used - cached))
            total = limit if total is None else min(total, limit)
            available = left if available is None else min(available, left)
    return total, available
