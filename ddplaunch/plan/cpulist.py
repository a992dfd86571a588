"""Lists of CPUs as the kernel writes them ("0-3,8"): the form of sysfs, ``taskset`` and the dry run."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the CPUs of a kernel list such as "0-55,112-167", ascending; an empty list has none.

    Its form is in ``Documentation/admin-guide/cputopology.rst`` of Linux. Raises ValueError if it is not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(cpus))


def format_cpulist(cpus: Iterable[int]) -> str:
    """Return the shortest kernel list of these CPUs: ``(0, 1, 2, 3, 8)`` is "0-3,8", none is ""."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
