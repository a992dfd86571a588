"""Text formatting: lists of names, ranks, signals, durations, sizes; spelling suggestions."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from unicodedata import combining, east_asian_width

MAX_LISTED_NAMES = 8


def join_names(names: Iterable[str]) -> str:
    """Join names to a list for a sentence; of many names, only the first are listed."""
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED_NAMES} more" if len(listed) > MAX_LISTED_NAMES else ""
    return ", ".join(listed[:MAX_LISTED_NAMES]) + more


def join_alternatives(names: Sequence[str]) -> str:
    """Join names as alternatives: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def format_count(count: int, noun: str) -> str:
    """Format a number of things: "1 rank", "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def closest_match(word: str, candidates: Iterable[str]) -> str | None:
    """Find the candidate that ``word`` misspells, or that begins with it; None if unsure."""
    names = sorted(candidates)
    letters = len(word.strip("-"))
    limit = max(1, letters // 3)
    similar = [name for name in names if abs(len(name) - len(word)) <= limit]  # a word may have thousands of letters
    close = [(distance, name) for name in similar if (distance := edit_distance(word, name)) <= limit]
    if close and letters > 1:
        return min(close)[1]
    longer = [name for name in names if letters > 2 and name.startswith(word)]
    return min(longer, key=len, default=None)


def edit_distance(word: str, other: str) -> int:
    """Edit distance (Damerau-Levenshtein): letters to replace, remove, insert or swap."""
    rows = [list(range(len(other) + 1))]
    for done, letter in enumerate(word, 1):
        before, row = rows[-1], [done]
        for at, another in enumerate(other):
            least = min(before[at] + (letter != another), before[at + 1] + 1, row[at] + 1)
            if done > 1 and at and letter == other[at - 1] and another == word[done - 2]:
                least = min(least, rows[-2][at - 1] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


def display_width(text: str) -> int:
    """Return how many terminal columns a text without control characters takes."""
    if text.isascii():
        return len(text)

    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def signal_name(number: int) -> str:
    """Name a signal: "SIGTERM"; "signal 40" where Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_minutes(seconds: float) -> str:
    """Format a duration in minutes and seconds: "00:12"."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def group_consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Group consecutive numbers: [[0, 1, 2], [8]]."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def format_ranks(numbers: Iterable[int]) -> str:
    """Format a list of ranks: "rank 3", "ranks 0, 1, 3", "ranks 0 to 6 and 8"; of many, only the first."""
    listed = sorted(set(numbers))
    parts: list[str] = []
    for run in group_consecutive(listed):
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
        if len(parts) > MAX_LISTED_NAMES:
            left = sum(number >= int(parts[MAX_LISTED_NAMES].partition(" ")[0]) for number in listed)
            return f"ranks {', '.join(parts[:MAX_LISTED_NAMES])} and {left} more"
    word = "ranks" if len(listed) > 1 else "rank"
    if len(parts) > 1 and len(parts) < len(listed):
        return f"{word} {', '.join(parts[:-1])} and {parts[-1]}"
    return f"{word} {', '.join(parts)}"


def format_rank_range(first: int, last: int) -> str:
    """Format the range of the ranks that exist: "ranks 0 to 3", "rank 0 only"."""
    return f"ranks {first} to {last}" if last > first else f"rank {first} only"


def format_elapsed(seconds: float) -> str:
    """Format a duration in its two largest units: "0.4s", "12s", "3m12s", "2h05m", "3d04h"."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}s"
    whole = round(seconds)
    for unit, below, name, of_below in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // below:02}{of_below}"
    return f"{whole}s"


def format_duration(seconds: float) -> str:
    """Format a duration for a sentence, without small units that do not matter: "0.4 s", "2 min 5 s", "3 h 12 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    for unit, below, name, of_below in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= unit:
            count, rest = whole // unit, whole % unit // below
            return f"{count} {name}" + (f" {rest} {of_below}" if rest and (unit > 60 or whole < 600) else "")
    return f"{whole} s"


def format_size(count: int) -> str:
    """Format a number of bytes in the largest unit in which it is at least 1: "312 KiB", "1.4 GiB"."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if unit in ("GiB", "TiB") else f"{amount:.0f} {unit}"


def normalize_name(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
