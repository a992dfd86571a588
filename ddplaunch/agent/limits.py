"""The kernel's limits on open files, processes and memory: how far we may go, and in words which of them was met."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddplaunch.devices.sysfs import read_text
from ddplaunch.errors import EXIT_OS, LaunchError, UsageError
from ddplaunch.words import counted

_FOUND, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

_NO_LIMIT = 1 << 60  # what version 1 of control groups has for "unlimited" is about 2**63
_SPARE = 16  # descriptors beside the ranks': those that are on their way to a zygote, files that are read


@contextmanager
def as_found() -> Iterator[None]:
    """Give what is started meanwhile the limit of open files that we were started with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FOUND, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def allow_descriptors(ranks: int, each: int) -> None:
    """Raise our limit of open files so that so many ranks can be served with so many descriptors each.

    Raises:
        UsageError: that is more than we may have.
    """
    need = len(os.listdir("/dev/fd")) + ranks * each + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    except (ValueError, OSError):
        raise UsageError(
            f"{counted(ranks, 'rank')} on this node need{'s' * (ranks == 1)} {need} open files, "
            f"and at most {hard} are allowed (ulimit -Hn)",
            "raise that limit, or start fewer ranks on each node",
        ) from None


class CannotStart(LaunchError):
    exit_code = EXIT_OS


def need_processes() -> None:
    """Check that we can see the processes below us, which are all ended with a job.

    Raises:
        CannotStart: /proc is not there.
    """
    if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
        raise CannotStart("/proc is not mounted: the processes of a job are found there", "mount -t proc proc /proc")


def why_unborn(number: int | None) -> str:
    """Say why no process could be made, or given its descriptors; ``number`` is errno's."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if number == errno.EMFILE:
        return f"too many open files: the limit is {soft} (ulimit -n)"
    if number == errno.ETOOMANYREFS:
        return f"too many descriptors of this user are on their way between processes: the limit is {soft} (ulimit -n)"
    if number == errno.EAGAIN:
        return f"too many processes: {_process_limit()}"
    return os.strerror(number or 0)


def _process_limit() -> str:
    for folder in _limiting():
        try:
            with open(f"{folder}/pids.max") as limits, open(f"{folder}/pids.current") as current:
                limit = limits.read().strip()
                if limit != "max" and int(current.read()) >= int(limit) - 1:
                    return f"the limit of the cgroup is {limit} (pids.max)"
        except (OSError, ValueError):
            continue
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid():
        return f"the user's limit is {soft} (ulimit -u)"
    return "the limit of the cgroup (pids.max), the user (ulimit -u) or the machine is reached"


def cgroups(root: str = "") -> list[tuple[str, str]]:
    """The controllers and the path of each cgroup that we are in; of v2, "" (cgroups(7)). /proc is below ``root``."""
    try:
        with open(f"{root}/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
            return [(controllers, path) for _, controllers, path in lines]
    except (OSError, ValueError):
        return []


def _limiting() -> Iterator[str]:
    """The folders that may limit our processes: our cgroup's, and those above it (v2, v1's pids)."""
    for controllers, path in cgroups():
        if controllers in ("", "pids"):
            mounts = ["/sys/fs/cgroup/pids"] if controllers else ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            while path:
                yield from (mount + path.rstrip("/") for mount in mounts)
                path = path.rstrip("/").rpartition("/")[0]


def number(path: str) -> int | None:
    try:
        return int(read_text(path) or "")
    except ValueError:  # "max" too
        return None


def groups(controller: str, root: str = "") -> Iterator[str]:
    """The folders of our control group and of those around it: of version 2, and of this controller of version 1."""
    for controllers, path in cgroups(root):
        if controllers and controller not in controllers.split(","):
            continue
        top = f"{root}/sys/fs/cgroup/{controller}" if controllers else f"{root}/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield "/".join((top, *parts[:depth]))


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
