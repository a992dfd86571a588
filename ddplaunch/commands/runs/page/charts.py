"""The charts: what ranks and GPUs did over time, restarts and stalls marked; and small ones for the table of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from ddplaunch.commands.runs.page.markup import Markup, element, section_with_heading
from ddplaunch.commands.runs.page.run import PageRun
from ddplaunch.commands.runs.page.timeline import LABELS, axis, mark
from ddplaunch.diagnosis.readings import GpuSample, RankSample
from ddplaunch.words import format_elapsed, format_size

CHART_STEPS = 200  # steps of a chart
_HOVER_STRIPES = 50  # places of a chart at which its figures can be read
_SPARKLINE_STEPS = 40  # steps of a small chart
_HEIGHT, _TITLE, _GAP = 52, 18, 10  # pixels of a panel, of its title, between two


class ChartMetric(NamedTuple):
    """One figure that a panel shows, of each rank or each GPU."""

    title: str
    field: str
    says: Callable[[float], str]
    of_gpus: bool = False


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _bytes(value: float) -> str:
    return format_size(int(value))


_PANELS = (
    ChartMetric("collectives a second", "collectives", _number),
    ChartMetric("CPUs of a rank", "cpus", _number),
    ChartMetric("memory of a rank", "memory", _bytes),
    ChartMetric("read a second", "read", _bytes),
    ChartMetric("written a second", "written", _bytes),
    ChartMetric("GPU busy", "busy", _percent, True),
    ChartMetric("GPU memory", "memory", _bytes, True),
    ChartMetric("GPU power", "power", lambda value: f"{value:.0f} W", True),
    ChartMetric("GPU slowed by heat or power", "slowed", lambda value: _percent(100 * value), True),
)

Values = list[float | None]


def over_time(run: PageRun, field: str, steps: int, *, of_gpus: bool = False) -> dict[int, Values]:
    """A figure of each rank (or GPU, all nodes' in a row) in each step of the run's time."""
    found: dict[int, Values] = {}
    at = (RankSample._fields if not of_gpus else GpuSample._fields).index(field)
    scale = steps / run.total
    for node, readings in enumerate(run.beside.readings):
        for each in readings:
            first = int(scale * (each.time - each.seconds - run.began))
            last = int(scale * (each.time - run.began))
            rows: Iterable[tuple[float | None, ...]] = each.gpus if of_gpus else each.ranks
            for row in rows:
                key = int(row[0] or 0) + 1000 * node * of_gpus
                values = found.setdefault(key, [None] * steps)
                for step in range(max(0, first), min(steps, last + 1)):
                    values[step] = row[at]
    return {key: found[key] for key in sorted(found)}


class _Panel(NamedTuple):
    measured: ChartMetric
    low: Values
    middle: Values
    high: Values

    @property
    def top(self) -> float:
        return max((each for each in self.high if each is not None), default=0.0)

    def says(self, step: int) -> str | None:
        """What is known at a step."""
        low, middle, high = self.low[step], self.middle[step], self.high[step]
        if low is None or middle is None or high is None:
            return None
        say = self.measured.says
        between = f" ({say(low)} to {say(high)})" if say(low) != say(high) else ""
        return f"{self.measured.title}: {say(middle)}{between}"


def _panels(run: PageRun) -> Iterator[_Panel]:
    for each in _PANELS:
        columns = zip(*over_time(run, each.field, CHART_STEPS, of_gpus=each.of_gpus).values(), strict=True)
        known = [sorted(value for value in column if value is not None) for column in columns]
        if any(values and values[-1] > 0 for values in known):
            low, high = ([values[place] if values else None for values in known] for place in (0, -1))
            yield _Panel(each, low, [median(values) if values else None for values in known], high)


def charts_section(run: PageRun) -> Markup | None:
    """The charts, one below the other on one axis; None without readings."""
    panels = [*_panels(run)]
    if not panels:
        return None
    step = _HEIGHT + _TITLE + _GAP
    height = step * len(panels)
    drawn = [_shade(run.at(began), run.at(ended), ended - began, height) for began, ended in run.first.stalls]
    labels = []
    for place, panel in enumerate(panels):
        drawn += _drawn(panel, step * place)
        for text, y in (panel.measured.says(panel.top), 10), ("0", _HEIGHT):
            labels.append(element("text", text, x="100%", y=step * place + _TITLE + y, text_anchor="end"))
    restarts = [each for each in run.attempts if each.number]
    drawn += [mark(run.at(each.began), f"attempt {each.number} began", height) for each in restarts]
    drawn += _hovers(panels, run.total, height)
    whole = {"width": "100%", "height": height + 22, "role": "img", "aria_label": "What the ranks used over time"}
    chart = element("svg", *drawn, *axis(run.total, height), **whole)
    names = element("svg", *labels, width=LABELS, height=height + 22, class_="labels", aria_hidden="true")
    said = ["The line is the median of the ranks, the band goes from the lowest to the highest."]
    said += ["A dashed line is a restart."] * bool(restarts) + ["Grey: stalled."] * bool(run.first.stalls)
    about = element("p", " ".join(said), class_="dim")
    return section_with_heading("Over time", about, element("div", names, chart, class_="chart"), id="charts")


def _drawn(panel: _Panel, y: int) -> Iterator[Markup]:
    say = panel.measured.says
    known = [each for each in panel.middle if each is not None]
    title = f"{panel.measured.title}: {say(median(known))}, at most {say(panel.top)}"
    yield element("text", title, x=0, y=y + 12, class_="title")
    parts = (
        element("path", d=_band(panel.low, panel.high, panel.top), class_="band"),
        element("path", d=_line(panel.middle, panel.top), class_="line"),
    )
    yield _stretched(CHART_STEPS, *parts, y=y + _TITLE, height=_HEIGHT, width="100%")
    yield element("line", x1=0, x2="100%", y1=y + _TITLE + _HEIGHT, y2=y + _TITLE + _HEIGHT, class_="base")


def _stretched(steps: int, *content: Markup, **attributes: object) -> Markup:
    """A drawing ``steps`` wide and 100 high, which fills its place."""
    box = {"viewBox": f"0 0 {steps} 100", "preserveAspectRatio": "none"}
    return element("svg", *content, **box, **attributes)


def _shade(left: float, right: float, seconds: float, height: int) -> Markup:
    rect = element("rect", x=f"{left:.2f}%", width=f"{max(right - left, 0.2):.2f}%", y=0, height=height, class_="still")
    return element("g", rect, element("title", f"stalled for {format_elapsed(seconds)}"))


def _hovers(panels: Sequence[_Panel], total: float, height: int) -> Iterator[Markup]:
    """Stripes that tell the figures at their middles."""
    for place in range(_HOVER_STRIPES):
        step = CHART_STEPS * (2 * place + 1) // (2 * _HOVER_STRIPES)
        said = [text for panel in panels if (text := panel.says(step))]
        if said:
            width = 100 / _HOVER_STRIPES
            rect = element("rect", x=f"{place * width:.2f}%", width=f"{width:.2f}%", y=0, height=height, class_="hover")
            yield element(
                "g",
                rect,
                element("title", "\n".join([f"after {format_elapsed(total * (step + 0.5) / CHART_STEPS)}", *said])),
            )


def sparkline(values: Sequence[float | None], top: float) -> Markup:
    """A chart for a cell of a table."""
    path = element("path", d=_line([*values], top), class_="line")
    return _stretched(len(values), path, class_="small", aria_hidden="true")


def sparklines(run: PageRun, field: str) -> Mapping[int, Markup]:
    """A small chart of a figure for each rank that has one, all on one scale."""
    found = over_time(run, field, _SPARKLINE_STEPS)
    top = max((each for values in found.values() for each in values if each is not None), default=0.0)
    return {rank: sparkline(values, top) for rank, values in found.items() if top}


def _line(values: Values, top: float) -> str:
    """The path of a figure, a part for each run of steps at which it is known."""
    parts = []
    for first, heights in _known(values, top):
        corners = [(y, first + place + 1) for place, y in enumerate(heights)]
        parts.append(f"M{first} {heights[0]}{_path(corners)}")
    return "".join(parts)


def _band(low: Values, high: Values, top: float) -> str:
    """The path around what lies between two figures, which are known at the same steps."""
    parts = []
    for (first, lower), (_, upper) in zip(_known(low, top), _known(high, top), strict=True):
        there = [(y, first + place + 1) for place, y in enumerate(upper)]
        back = [(y, first + place) for place, y in enumerate(lower)][::-1]
        parts.append(f"M{first} {upper[0]}{_path(there)}{_path(back)}Z")
    return "".join(parts)


def _known(values: Values, top: float) -> Iterator[tuple[int, list[int]]]:
    """Each run of steps at which a figure is known: the first, and how high to draw it at each."""
    place = 0
    for known, group in groupby(values, lambda value: value is not None):
        part = [*group]
        if known:
            yield place, [round(100 - 98 * (value or 0.0) / (top or 1.0)) for value in part]
        place += len(part)


def _path(corners: Sequence[tuple[int, int]]) -> str:
    """To each height, and along it; equal ones are one step."""
    return "".join(f"V{y}H{x}" for (y, x), (after, _) in pairwise([*corners, (-1, 0)]) if y != after)
