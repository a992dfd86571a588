"""The share of the processors' time that a container or a service has: what ``docker run --cpus 4`` means.

Source: Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (cpu.cfs_quota_us) of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddplaunch.devices.sysfs import read_text


def read_quota(sysfs: Path, proc: Path = Path("/proc")) -> float | None:
    """Return how many CPUs' time all processes of our control group may use together; None if there is no limit.

    The narrowest group counts, ours or one around it. In a container the outer ones are not seen.
    """
    shares = [share for folder in _groups(sysfs / "fs/cgroup", proc) if (share := _share(folder)) is not None]
    return min(shares, default=None)


def _groups(root: Path, proc: Path) -> Iterator[Path]:
    """Our groups of version 2 and of version 1's cpu controller, each with those around it."""
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in [root / controllers, root / "cpu"] if controllers else [root, root / "unified"]:
            group = base / path.strip("/")
            yield from (group, *(each for each in group.parents if each.is_relative_to(base)))


def _share(group: Path) -> float | None:
    quota, _, period = (read_text(group / "cpu.max") or "").partition(" ")
    if not period:
        quota, period = (read_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return share if share > 0 else None
