"""Kernel limits for jobs of many nodes: raises RLIMIT_NOFILE, reports sysctls that are too low."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress

from ddplaunch.system.processes.process_limits import allow_open_files, read_rlimit

LARGE_JOB_NODES = 1000  # with fewer nodes these limits do not matter
_OTHER_FILES = 40  # descriptors besides the pipes of hosts: the event loop, outputs, an ssh that starts
_SPARE_DESCRIPTORS = 128  # for other descriptors, neighbours and connections than those of the nodes
_SYSCTLS = "/proc/sys/net"


def raise_fd_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it; ranks get the original limit."""
    soft, hard = read_rlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def raise_fd_limit_for_hosts(hosts: int) -> None:
    """Raise the limit on open files to three pipes for each host. Raises UsageError if the hard limit is lower."""
    allow_open_files(3 * hosts + _OTHER_FILES, f"{hosts} hosts need", "start fewer hosts, or ask for a higher limit")


def describe_low_limits(nodes: int, sysctls: str = _SYSCTLS) -> str | None:
    """Describe which limits to raise on node 0 of a job of ``nodes``; None if none is too low, or nodes are few.

    ``sysctls``: /proc/sys/net (proc(5)); a setting that cannot be read is skipped.
    """
    limits = list(_list_low_limits(nodes + _SPARE_DESCRIPTORS, sysctls)) if nodes >= LARGE_JOB_NODES else []
    if not limits:
        return None
    return f"limits of this machine are too low for node 0 of {nodes:,} nodes; raise them as root:\n" + "\n".join(
        f"  {each}" for each in limits
    )


def _list_low_limits(need: int, sysctls: str) -> Iterator[str]:
    hard = read_rlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        yield f"open files (ulimit -Hn): {hard}, needs {need}; beyond that, nodes cannot join"
    names = {"core/somaxconn": "beyond that, nodes that connect at once must retry"}
    # with cookies the kernel does without this queue (tcp_input.c)
    if _read_sysctl(sysctls, "ipv4/tcp_syncookies") == 0:
        names["ipv4/tcp_max_syn_backlog"] = "the same, because net.ipv4.tcp_syncookies is 0"
    names["ipv4/neigh/default/gc_thresh3"] = "beyond that, packets are dropped if all nodes are in one network"
    for name, why in names.items():
        value = _read_sysctl(sysctls, name)
        if value is not None and value < need:
            yield f"net.{name.replace('/', '.')}: {value}, needs {need}; {why}"


def _read_sysctl(sysctls: str, name: str) -> int | None:
    try:
        with open(f"{sysctls}/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
