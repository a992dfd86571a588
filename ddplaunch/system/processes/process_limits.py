"""The kernel's limits on open files and processes: raises them, and describes which one was reached."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ddplaunch.base.errors import EXIT_OS, LaunchError, UsageError
from ddplaunch.base.text import format_count
from ddplaunch.system.devices import cgroups
from ddplaunch.system.devices.sysfs import read_int
from ddplaunch.system.processes import proc_utils


def read_rlimit(kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit; RLIM_INFINITY for both where a container forbids the system call."""
    try:
        return resource.getrlimit(kind)
    except OSError:
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


_ORIGINAL_NOFILE, _ = read_rlimit(resource.RLIMIT_NOFILE)

_SPARE_FDS = 16  # besides those of ranks: descriptors in flight to a zygote, files being read


@contextmanager
def original_nofile_limit() -> Iterator[None]:
    """Context manager: child processes started inside get the original RLIMIT_NOFILE."""
    soft, hard = read_rlimit(resource.RLIMIT_NOFILE)
    if soft == _ORIGINAL_NOFILE:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (_ORIGINAL_NOFILE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def raise_fd_limit_for_ranks(ranks: int, fds_per_rank: int) -> None:
    """Raise the launcher's RLIMIT_NOFILE to what this number of ranks needs.

    Raises UsageError if the hard limit is lower.
    """
    need = _count_open() + ranks * fds_per_rank + _SPARE_FDS
    who = f"{format_count(ranks, 'rank')} on this node need{'s' * (ranks == 1)}"
    allow_open_files(need, who, "raise that limit, or start fewer ranks on each node")


def allow_open_files(need: int, who: str, hint: str) -> None:
    """Raise RLIMIT_NOFILE to ``need`` if it is lower.

    Raises UsageError if the hard limit is lower; the message begins with ``who``, "8 hosts need".
    """
    soft, hard = read_rlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    except (ValueError, OSError):
        what = f"{who} {need} open files, and at most {hard} are allowed (ulimit -Hn)"
        raise UsageError(what, hint) from None


def _count_open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):  # the second is a link to the first, if it is there, or not Linux
        with suppress(OSError):
            return len(os.listdir(folder))
    return 0


class ResourceLimitError(LaunchError):
    """A limit on processes, memory or system calls prevents the start of ranks."""

    exit_code = EXIT_OS


def check_proc() -> None:
    """Check that /proc and the system calls work that are needed to find and kill the processes of a job.

    Raises ResourceLimitError if /proc is missing or belongs to another PID namespace, or a system call is forbidden.
    """
    if sys.platform != "linux":
        return
    remedy = "mount -t proc proc /proc"
    if not os.path.exists("/proc/self/stat"):
        raise ResourceLimitError("/proc is not mounted; it is needed to find the processes of a job", remedy)
    if (there := os.readlink("/proc/self")) != str(os.getpid()):
        what = f"/proc belongs to another PID namespace: this process is {os.getpid()}, but {there} there"
        raise ResourceLimitError(what, f"{remedy}, or unshare --mount-proc")
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("prctl", proc_utils.check_prctl),
        ("socketpair", socket.socketpair),
    )
    for name, call in calls:
        try:
            call()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
                what = f"the system call {name} is needed to start ranks and fails: {error.strerror}"
                raise ResourceLimitError(what, "allow it in the container's seccomp profile") from None


def describe_spawn_error(number: int | None) -> str:
    """Describe why a process could not be started, or could not be sent descriptors; ``number`` is an errno."""
    soft = read_rlimit(resource.RLIMIT_NOFILE)[0]
    if number == errno.EMFILE:
        return f"too many open files: the limit is {soft} (ulimit -n)"
    if number == errno.ETOOMANYREFS:
        return f"too many descriptors of this user are in flight between processes: the limit is {soft} (ulimit -n)"
    if number == errno.EAGAIN:
        return f"too many processes: {_describe_process_limit()}"
    return os.strerror(number or 0)


def _describe_process_limit() -> str:
    for folder in cgroups.list_cgroup_dirs("pids"):
        limit, used = read_int(f"{folder}/pids.max"), read_int(f"{folder}/pids.current")
        if limit is not None and used is not None and used >= limit - 1:
            return f"the limit of the cgroup is {limit} (pids.max)"
    soft = read_rlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid():
        return f"the user's limit is {soft} (ulimit -u)"
    return "the limit of the cgroup (pids.max), the user (ulimit -u) or the machine is reached"
