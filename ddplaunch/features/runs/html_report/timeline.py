"""The timeline of the page: a row for each rank, a bar for each of its attempts, in a drawing that fits any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.text import format_elapsed, format_ranks
from ddplaunch.features.runs.html_report.page_run import PageRun, RankOutcome, RankRow

_HEIGHTS = ((32, 16), (128, 8), (256, 4))  # up to this many ranks, this many pixels for each
_LEAST = 2
_LABEL = 14  # pixels that a label needs
LABELS = 64  # pixels for the labels at the left, at least
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)
_TICKS = 5
_NARROWEST = 0.15  # per cent of the width, for a bar to be visible

_MERGE_TOLERANCE = 0.01  # of the duration: ranks that share a row may differ by this

_LEGEND = {
    RankOutcome.WELL: "ended with 0",
    RankOutcome.FAILED: "failed first",
    RankOutcome.SECONDARY: "failed because of another",
    RankOutcome.STOPPED: "was stopped",
    RankOutcome.RUNNING: "was running",
    RankOutcome.UNKNOWN: "unknown end",
}


class Bar(NamedTuple):
    """One attempt of a rank, or of several ranks with the same outcome; times in seconds since the epoch."""

    row: RankRow  # of the first of these ranks
    began: float
    ended: float


class Lane(NamedTuple):
    """One row of the drawing."""

    numbers: tuple[int, ...]  # of the ranks
    bars: tuple[Bar, ...]

    @property
    def name(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        return str(first) if first == last else f"{first}–{last}"

    def can_merge_with(self, other: Lane, close: float) -> bool:
        """Whether the ranks of both lanes ended in the same way, and began and ended within ``close`` seconds."""
        return len(self.bars) == len(other.bars) and all(
            (mine.row.attempt, mine.row.end, mine.row.rank.code) == (its.row.attempt, its.row.end, its.row.rank.code)
            and max(abs(mine.began - its.began), abs(mine.ended - its.ended)) <= close
            for mine, its in zip(self.bars, other.bars, strict=True)
        )


class Box(NamedTuple):
    """A rectangle with a tooltip; ``x`` and ``width`` are relative to the width of the drawing."""

    title: str
    x: str
    width: str
    y: int
    height: int
    class_name: str = ""


class Tick(NamedTuple):
    """A tick of a time axis."""

    x: str
    anchor: str  # of its text, as in SVG
    text: str


def timeline(run: PageRun) -> Mapping[str, object] | None:
    """Return the timeline and the table of attempts; None if no rank was planned."""
    rows = [row for each in run.attempts for row in each.rows]
    if not rows:
        return None
    lanes = _build_lanes(run, rows)
    lane_height = next((height for most, height in _HEIGHTS if len(lanes) <= most), _LEAST)
    height = lane_height * len(lanes)
    labels = _build_labels(lanes, lane_height)
    seen = {row.end for row in rows if row.rank.started}
    legend = [(end.value, text) for end, text in _LEGEND.items() if end in seen]
    inspections = (each for share in run.shares for each in share.inspections)
    return {
        "title": f"{len({row.rank.rank for row in rows})} ranks over {format_elapsed(run.total)}",
        "legend": [*legend, ("still", "no progress")] if run.stalls else legend,
        "height": height,
        "labels": labels,
        "labels_width": max(LABELS, 8 * max(len(name) for name, _ in labels)),
        "boxes": [
            *_build_attempt_bands(run, height),
            *_build_bars(run, lanes, lane_height),
            *_build_stall_bands(run, height),
        ],
        "marks": [
            (at(run, each.moment), f"{format_elapsed(each.moment - run.began)}: stacks of the ranks were taken")
            for each in inspections
        ],
        "attempts": [*_attempts(run)],
    }


def at(run: PageRun, moment: float) -> str:
    """Return the horizontal position of a moment, in per cent of the run's duration."""
    return f"{run.percent_at(moment):.3f}%"


def _build_attempt_bands(run: PageRun, height: int) -> Iterator[Box]:
    for each in run.attempts:
        width = max(run.percent_at(each.ended) - run.percent_at(each.began), _NARROWEST)
        yield Box(f"attempt {each.number}", at(run, each.began), f"{width:.3f}%", 0, height, "attempt")


def _build_bars(run: PageRun, lanes: list[Lane], lane_height: int) -> Iterator[Box]:
    gap = 2 if lane_height > 8 else 1 if lane_height > 2 else 0
    for place, lane in enumerate(lanes):
        for bar in lane.bars:
            left, width = _place(run, bar.began, bar.ended)
            title, y = _describe_bar(lane, bar, run), place * lane_height
            yield Box(title, left, width, y, lane_height - gap, bar.row.end.value)


def _build_stall_bands(run: PageRun, height: int) -> Iterator[Box]:
    """Yield the bands of times without progress: they lie above the bars, which stay visible."""
    for begin, end in run.stalls:
        title = f"{format_elapsed(begin - run.began)}: no progress for {format_elapsed(end - begin)}"
        yield Box(title, *_place(run, begin, end), 0, height, "still")


def _place(run: PageRun, began: float, ended: float) -> tuple[str, str]:
    """Return left side and width of a box for a period; a short period is widened, so that it is visible."""
    left = min(run.percent_at(began), 100 - _NARROWEST)
    return f"{left:.3f}%", f"{max(run.percent_at(ended) - left, _NARROWEST):.3f}%"


def _build_lanes(run: PageRun, rows: list[RankRow]) -> list[Lane]:
    """Build the rows; in a large job, consecutive ranks with the same outcome share one."""
    known: dict[int, list[RankRow]] = {}
    for row in rows:
        known.setdefault(row.rank.rank, []).append(row)
    lanes = []
    for number in sorted(known):
        bars = (Bar(row, row.rank.started, row.rank.ended or run.ended) for row in known[number] if row.rank.started)
        lanes.append(Lane((number,), tuple(bars)))
    if len(lanes) <= _HEIGHTS[0][0]:
        return lanes
    close = _MERGE_TOLERANCE * (run.ended - run.began)
    together = lanes[:1]
    for lane in lanes[1:]:
        if lane.can_merge_with(together[-1], close):
            together[-1] = together[-1]._replace(numbers=(*together[-1].numbers, *lane.numbers))
        else:
            together.append(lane)
    return together


def _build_labels(lanes: list[Lane], lane_height: int) -> list[tuple[str, float]]:
    step = 1
    while step * lane_height < _LABEL or len(lanes) > 200 * step:
        step *= 2
    shown = [(place, lane.name) for place, lane in enumerate(lanes) if place % step == 0]
    return [(name, max(11, place * lane_height + lane_height / 2 + 4)) for place, name in shown]


def axis_ticks(total: float) -> Iterator[Tick]:
    """Yield the ticks of a time axis."""
    step = next((each for each in _STEPS if total / each <= _TICKS), 0.0)
    if not step:
        step = 43200.0
        while total / step > _TICKS:
            step *= 2
    tick = 0.0
    while tick <= total:
        x = 100 * tick / total
        yield Tick(f"{x:.3f}%", "start" if x < 3 else "end" if x > 93 else "middle", _format_tick(tick))
        tick += step


def _format_tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else format_elapsed(seconds)


def _describe_bar(lane: Lane, bar: Bar, run: PageRun) -> str:
    where = f" on {bar.row.rank.host}" if bar.row.rank.host and len(lane.numbers) == 1 else ""
    attempt = f", attempt {bar.row.attempt}" if len(run.attempts) > 1 else ""
    times = f"started at {format_elapsed(bar.began - run.began)}, lasted {format_elapsed(bar.ended - bar.began)}"
    return f"{format_ranks(lane.numbers)}{where}{attempt}: {bar.row.outcome_text}; {times}"


def _attempts(run: PageRun) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of attempts, if there are several or the reason of an end is known."""
    if len(run.attempts) < 2 and not any(each.why for each in run.attempts):
        return
    for each in run.attempts:
        times = format_elapsed(each.began - run.began), format_elapsed(each.ended - each.began)
        yield str(each.number), *times, str(len(each.rows)), each.why or "–"
