"""Limits on resources of this process, as the kernel has them (getrlimit(2))."""

from __future__ import annotations

import resource


def read(kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit; RLIM_INFINITY for both where a container forbids the system call."""
    try:
        return resource.getrlimit(kind)
    except OSError:
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY
