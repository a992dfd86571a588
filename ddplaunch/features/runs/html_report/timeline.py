"""The timeline of the page: a row for each rank, a bar for each of its attempts, as SVG that fits any width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ddplaunch.base.text import format_elapsed, format_ranks
from ddplaunch.features.runs.html_report.html import Markup, element, section_with_heading, table
from ddplaunch.features.runs.html_report.page_run import PageAttempt, PageRun, RankOutcome, RankRow

_HEIGHTS = ((32, 16), (128, 8), (256, 4))  # up to this many ranks, this many pixels for each
_LEAST = 2
_LABEL = 14  # pixels that a label needs
_AXIS = 22
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
    """One attempt of a rank, or of several with the same outcome; times in seconds since the epoch."""

    row: RankRow  # the first one's
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
        """Whether the ranks began and ended within ``close`` seconds of the others, and ended in the same way."""
        return len(self.bars) == len(other.bars) and all(
            (mine.row.attempt, mine.row.end, mine.row.rank.code) == (its.row.attempt, its.row.end, its.row.rank.code)
            and max(abs(mine.began - its.began), abs(mine.ended - its.ended)) <= close
            for mine, its in zip(self.bars, other.bars, strict=True)
        )


def timeline_section(run: PageRun) -> Markup | None:
    """Build the timeline and the table of attempts; None if no rank was planned."""
    rows = [row for each in run.attempts for row in each.rows]
    if not rows:
        return None
    parts = _build_legend(rows, has_stalls=bool(run.stalls)), _build_chart(run, rows), *_attempts(run)
    return section_with_heading("Timeline", *parts, id="timeline")


def _build_legend(rows: list[RankRow], *, has_stalls: bool) -> Markup:
    seen = {row.end for row in rows if row.rank.started}
    items = [element("li", element("i", class_=end.value), text) for end, text in _LEGEND.items() if end in seen]
    if has_stalls:
        items.append(element("li", element("i", class_="still"), "no progress"))
    return element("ul", *items, class_="legend")


def _build_chart(run: PageRun, rows: list[RankRow]) -> Markup:
    lanes = _build_lanes(run, rows)
    lane_height = next((height for most, height in _HEIGHTS if len(lanes) <= most), _LEAST)
    height = lane_height * len(lanes)
    gap = 2 if lane_height > 8 else 1 if lane_height > 2 else 0
    drawn = [_build_attempt_band(run, each, height) for each in run.attempts]
    for place, lane in enumerate(lanes):
        for bar in lane.bars:
            left, right = min(run.percent_at(bar.began), 100 - _NARROWEST), run.percent_at(bar.ended)
            where = {"x": f"{left:.3f}%", "width": f"{max(right - left, _NARROWEST):.3f}%"}
            rect = element("rect", **where, y=place * lane_height, height=lane_height - gap, class_=bar.row.end.value)
            drawn.append(element("g", rect, element("title", _describe_bar(lane, bar, run))))
    drawn += [_build_stall(run, begin, end, height) for begin, end in run.stalls]
    for each in (each for share in run.shares for each in share.inspections):
        text = f"{format_elapsed(each.moment - run.began)}: stacks of the ranks were taken"
        drawn.append(mark(run.percent_at(each.moment), text, height))
    label = f"{len({row.rank.rank for row in rows})} ranks over {format_elapsed(run.total)}"
    size = {"width": "100%", "height": height + _AXIS}
    chart = element("svg", *drawn, *axis(run.total, height), **size, role="img", aria_label=label)
    return element("div", _build_labels(lanes, lane_height, height), chart, class_="chart")


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


def _build_labels(lanes: list[Lane], lane_height: int, height: int) -> Markup:
    step = 1
    while step * lane_height < _LABEL or len(lanes) > 200 * step:
        step *= 2
    shown = [(place, lane.name) for place, lane in enumerate(lanes) if place % step == 0]
    texts = (
        element("text", name, x="100%", y=max(11, place * lane_height + lane_height / 2 + 4), text_anchor="end")
        for place, name in shown
    )
    width = max(LABELS, 8 * max(len(name) for _, name in shown))
    return element("svg", *texts, width=width, height=height + _AXIS, class_="labels", aria_hidden="true")


def _build_attempt_band(run: PageRun, each: PageAttempt, height: int) -> Markup:
    left, right = run.percent_at(each.began), run.percent_at(each.ended)
    title = element("title", f"attempt {each.number}")
    width = f"{max(right - left, _NARROWEST):.3f}%"
    return element("g", element("rect", x=f"{left:.3f}%", y=0, width=width, height=height, class_="attempt"), title)


def _build_stall(run: PageRun, begin: float, end: float, height: int) -> Markup:
    """Build the band of a time without progress: it lies above the bars, which stay visible."""
    left = min(run.percent_at(begin), 100 - _NARROWEST)
    width = f"{max(run.percent_at(end) - left, _NARROWEST):.3f}%"
    title = element("title", f"{format_elapsed(begin - run.began)}: no progress for {format_elapsed(end - begin)}")
    return element("g", element("rect", x=f"{left:.3f}%", y=0, width=width, height=height, class_="still"), title)


def mark(x: float, text: str, height: int) -> Markup:
    """Build a vertical line at ``x`` per cent of the width."""
    line = element("line", x1=f"{x:.3f}%", x2=f"{x:.3f}%", y1=0, y2=height)
    return element("g", line, element("title", text), class_="mark")


def axis(total: float, height: int) -> Iterator[Markup]:
    """Yield the ticks of a time axis below a drawing of this height."""
    step = next((each for each in _STEPS if total / each <= _TICKS), 0.0)
    if not step:
        step = 43200.0
        while total / step > _TICKS:
            step *= 2
    tick = 0.0
    while tick <= total:
        x = 100 * tick / total
        anchor = "start" if x < 3 else "end" if x > 93 else "middle"
        yield element("line", x1=f"{x:.3f}%", x2=f"{x:.3f}%", y1=height, y2=height + 5, class_="tick")
        yield element("text", _format_tick(tick), x=f"{x:.3f}%", y=height + 18, text_anchor=anchor)
        tick += step


def _format_tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else format_elapsed(seconds)


def _describe_bar(lane: Lane, bar: Bar, run: PageRun) -> str:
    where = f" on {bar.row.rank.host}" if bar.row.rank.host and len(lane.numbers) == 1 else ""
    attempt = f", attempt {bar.row.attempt}" if len(run.attempts) > 1 else ""
    times = f"started at {format_elapsed(bar.began - run.began)}, lasted {format_elapsed(bar.ended - bar.began)}"
    return f"{format_ranks(lane.numbers)}{where}{attempt}: {bar.row.outcome_text}; {times}"


def _attempts(run: PageRun) -> Iterator[Markup]:
    """Yield the table of attempts, if there are several or the reason of an end is known."""
    if len(run.attempts) < 2 and not any(each.why for each in run.attempts):
        return
    rows = []
    for each in run.attempts:
        times = format_elapsed(each.began - run.began), format_elapsed(each.ended - each.began)
        rows.append([str(each.number), *times, str(len(each.rows)), each.why or "–"])
    yield table(["attempt", "began after", "lasted", "ranks", "ended because"], rows)
    if run.first.left_out:
        yield element("p", f"{run.first.left_out} earlier attempts were not recorded.", class_="dim")
