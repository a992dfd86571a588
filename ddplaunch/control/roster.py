"""Who is there and who is not, in words: the line that stands there while the job waits for its nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from ddplaunch.control.messages import MOST_NAMED, Roster


def roster(
    present: Collection[int], least: int, most: int, window: float | None, kind: Literal["node", "task"]
) -> Roster:
    """Count the nodes that are there; ``window`` and ``kind`` as in ``Roster``."""
    missing = [number for number in range(most) if number not in present]
    return Roster(len(present), least, most, tuple(missing[:MOST_NAMED]), window, kind)


def free_number(present: Collection[int], most: int, *, wanted: int) -> int:
    """The node rank for one who has none: ``wanted``, or the lowest that is free; ``most`` where none is."""
    if wanted < most and wanted not in present:
        return wanted
    return next((number for number in range(most) if number not in present), most)


def describe(roster: Roster) -> str:
    """Say it without the time: "2/4 nodes joined, waiting for node 2, 3"."""
    wanted = f"{roster.least} to {roster.most}" if roster.least < roster.most else str(roster.most)
    count = f"{roster.joined} of {wanted}" if roster.least < roster.most else f"{roster.joined}/{wanted}"
    unnamed = roster.most - roster.joined - len(roster.missing)
    names = ", ".join(map(str, roster.missing)) + (f" and {unnamed} more" if unnamed > 0 else "")
    joined, missing = f"{count} {roster.kind}s joined", f"{roster.kind} {names}"
    if roster.window is not None:
        return f"{joined}, starting in {roster.window:.0f} s unless {missing} comes before"
    return f"{joined}, waiting for {missing}"


def clock(seconds: float) -> str:
    """Minutes and seconds, as in "00:12"."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def named(names: Iterable[str]) -> str:
    """List some names, the first of many."""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
