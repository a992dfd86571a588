"""Parsers and formatters of numbers and of the kernel's CPU lists.

Numbers are those that people type: ASCII digits, and not what Python's ``int`` takes besides ("1_0", "٣", " 1", "+1").
Lists of CPUs ("0-3,8") are the kernel's: the form of sysfs, ``taskset`` and the dry run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddplaunch.base.text import group_consecutive

_WHOLE = r"-?[0-9]{1,18}"
_DECIMAL = r"-?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})(e-?[0-9]{1,2})?"


def parse_int(text: str) -> int | None:
    """Parse an integer of at most 18 digits; None if it is not one."""
    return int(text) if re.fullmatch(_WHOLE, text) else None


def parse_float(text: str) -> float | None:
    """Parse a number like 2, 2.5 or 1e3; None if it is not one."""
    return float(text) if re.fullmatch(_DECIMAL, text, re.IGNORECASE) else None


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
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in group_consecutive(set(cpus)))
