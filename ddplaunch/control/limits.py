"""The limits of node 0's kernel that a job of many nodes can meet: what of them we may raise, and which are too low."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress

from ddplaunch import rlimits

LARGE_JOB_NODES = 1000  # nodes from which on these limits matter
_SPARE_DESCRIPTORS = 128  # descriptors, neighbours and connections beside those of the nodes
_SYSCTLS = "/proc/sys/net"


def raise_fd_limit() -> int:
    """Raise our limit of open files as far as we may, and return it; the ranks have been given theirs before."""
    soft, hard = rlimits.read(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def find_low_limits(nodes: int, sysctls: str = _SYSCTLS) -> str | None:
    """Say which limits to raise on node 0 of a job of so many nodes; None where none is too low, or nodes are few.

    ``sysctls`` is the kernel's folder net/ of settings (proc(5)); a setting that cannot be read is left out.
    """
    found = list(_low_sysctls(nodes + _SPARE_DESCRIPTORS, sysctls)) if nodes >= LARGE_JOB_NODES else []
    if not found:
        return None
    return f"node 0 serves {nodes:,} nodes; raise on this machine, as root, what is too low:\n" + "\n".join(
        f"  {each}" for each in found
    )


def _low_sysctls(need: int, sysctls: str) -> Iterator[str]:
    hard = rlimits.read(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        yield f"open files (ulimit -Hn): {hard}, at least {need}; beyond that no node can join"
    names = {"core/somaxconn": "nodes that call at once try again"}
    if (
        _read_sysctl(sysctls, "ipv4/tcp_syncookies") == 0
    ):  # with cookies the kernel does without this queue (tcp_input.c)
        names["ipv4/tcp_max_syn_backlog"] = "the same, as net.ipv4.tcp_syncookies is 0"
    names["ipv4/neigh/default/gc_thresh3"] = "needed if all nodes are in one network: beyond it packets are dropped"
    for name, why in names.items():
        value = _read_sysctl(sysctls, name)
        if value is not None and value < need:
            yield f"net.{name.replace('/', '.')}: {value}, at least {need}; {why}"


def _read_sysctl(sysctls: str, name: str) -> int | None:
    try:
        with open(f"{sysctls}/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
