"""Small words: lists of names, times."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMED = 8


def named(names: Iterable[str]) -> str:
    """List some names, the first of many."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more


def clock(seconds: float) -> str:
    """Minutes and seconds, as in "00:12"."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"
