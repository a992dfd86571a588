"""Describes the goodput of runs: the effective part of their time, and where the rest went. Adds up their times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import astuple, replace

from ddplaunch.base.text import format_count, format_duration
from ddplaunch.observe.history.run_record import RunRecord
from ddplaunch.observe.history.time_breakdown import TimeBreakdown, TimeCategory

MIN_SHOWN_FRACTION = 0.01  # of the wall time: smaller categories are not shown

_CATEGORY_NAMES: Mapping[TimeCategory, str] = {
    TimeCategory.QUEUED: "queued",
    TimeCategory.WAITING: "waiting for nodes",
    TimeCategory.IMPORTS: "starting",
    TimeCategory.FIRST_COLLECTIVE: "until the first collective",
    TimeCategory.STALLED: "stalled",
    TimeCategory.STRAGGLER: "waiting for a straggler",
    TimeCategory.STOPPING: "stopping",
    TimeCategory.RESTARTING: "",
    TimeCategory.DISCARDED: "of work after the last checkpoint",
}


def lost_times(spent: TimeBreakdown) -> list[tuple[float, str]]:
    """Return the seconds and the name of each category that was not effective, the largest first."""
    names = {**_CATEGORY_NAMES, TimeCategory.RESTARTING: f"in {format_count(spent.restarts, 'restart')}"}
    times = [(getattr(spent, part.value), text) for part, text in names.items()]
    return sorted((each for each in times if each[0] > 0), reverse=True)


def format_goodput(spent: TimeBreakdown) -> str | None:
    """Describe goodput and lost time in one line; None if the wall time is 0."""
    if spent.goodput is None:
        return None
    shown = [
        f"{format_duration(seconds)} {text}"
        for seconds, text in lost_times(spent)
        if seconds >= MIN_SHOWN_FRACTION * spent.wall_s
    ]
    lost = f"; lost: {', '.join(shown)}" if shown else ""
    steady, wall = format_duration(spent.steady), format_duration(spent.wall_s)
    return f"goodput {format_percent(spent.goodput)}: {steady} of {wall}{lost}"


def format_percent(share: float | None) -> str:
    """Format a fraction as a percentage, rounded down: "91 %"."""
    return "-" if share is None else f"{int(100 * share)} %"


def sum_breakdowns(parts: Iterable[TimeBreakdown]) -> TimeBreakdown:
    return TimeBreakdown(*map(sum, zip(*map(astuple, parts), strict=True)))


def total_breakdown(runs: Sequence[RunRecord], submitted: float | None = None) -> TimeBreakdown:
    """Sum up the time of all runs of one batch job, in order.

    The time between two runs, and from ``submitted`` to the first, counts as queued.
    """
    spent, over = sum_breakdowns(each.spent for each in runs), submitted
    queued = 0.0
    for each in runs:
        if over is not None:
            queued += max(0.0, each.began - over)
        over = max(over or 0.0, each.began + each.spent.wall_s)
    return replace(spent, queued=spent.queued + queued)
