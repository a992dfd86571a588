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


def ranks(numbers: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 1, 3", "ranks 0 to 6 and 8"; the first of many."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    word = "ranks" if sum(map(len, runs)) > 1 else "rank"
    if len(listed) > MAX_NAMED:
        return f"{word} {named(listed)}"
    if len(listed) > 1 and any(" " in part for part in listed):
        return f"{word} {', '.join(listed[:-1])} and {listed[-1]}"
    return f"{word} {', '.join(listed)}"
