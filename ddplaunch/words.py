"""Small words: lists of names, near misses, times."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMED = 8


def named(names: Iterable[str]) -> str:
    """List some names, the first of many."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that ``word`` may be a typing error of."""
    import difflib

    return next(iter(difflib.get_close_matches(word, sorted(known), 1, 0.65)), None)


def clock(seconds: float) -> str:
    """Minutes and seconds, as in "00:12"."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"
