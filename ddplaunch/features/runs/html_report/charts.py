"""The charts of the page: metrics of ranks and GPUs over time, with restarts and stalls; sparklines for the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from ddplaunch.base.text import format_elapsed, format_size
from ddplaunch.features.runs.html_report.page_run import PageRun
from ddplaunch.features.runs.html_report.timeline import LABELS, Box, at
from ddplaunch.observe.samples.sample import GpuSample, RankSample

CHART_STEPS = 200
HOVER_STRIPES = 50  # of a chart, each with a tooltip
SPARKLINE_STEPS = 40
_HEIGHT, _TITLE, _GAP = 52, 18, 10  # pixels of a panel, of its title, between two


class ChartMetric(NamedTuple):
    """The metric that one panel of the HTML page plots, with a line for each rank or each GPU."""

    title: str
    field: str
    format: Callable[[float], str]
    of_gpus: bool = False


def _format_number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _format_percent(value: float) -> str:
    return f"{value:.0f} %"


def _format_bytes(value: float) -> str:
    return format_size(int(value))


_PANELS = (
    ChartMetric("collectives a second", "collectives", _format_number),
    ChartMetric("CPU of a rank", "cpus", lambda value: _format_percent(100 * value)),  # 200 %: two CPUs
    ChartMetric("memory of a rank", "memory", _format_bytes),
    ChartMetric("read a second", "read", _format_bytes),
    ChartMetric("written a second", "written", _format_bytes),
    ChartMetric("GPU busy", "busy", _format_percent, True),
    ChartMetric("GPU memory", "memory", _format_bytes, True),
    ChartMetric("GPU power", "power", lambda value: f"{value:.0f} W", True),
    ChartMetric("GPU slowed by heat or power", "slowed", lambda value: _format_percent(100 * value), True),
)

Values = list[float | None]


def metric_over_time(run: PageRun, field: str, steps: int, *, of_gpus: bool = False) -> dict[int, Values]:
    """Return a metric of each rank (or GPU, numbered over all nodes) in each step of the run's time."""
    series: dict[int, Values] = {}
    at = (RankSample._fields if not of_gpus else GpuSample._fields).index(field)
    scale = steps / run.total
    for node, readings in enumerate(run.inputs.readings):
        for reading in readings:
            first = int(scale * (reading.time - reading.seconds - run.began))
            last = int(scale * (reading.time - run.began))
            rows: Iterable[tuple[float | None, ...]] = reading.gpus if of_gpus else reading.ranks
            for row in rows:
                key = int(row[0] or 0) + 1000 * node * of_gpus
                values = series.setdefault(key, [None] * steps)
                for step in range(max(0, first), min(steps, last + 1)):
                    values[step] = row[at]
    return {key: series[key] for key in sorted(series)}


class _Panel(NamedTuple):
    metric: ChartMetric
    low: Values
    middle: Values
    high: Values
    at_least: float = 0.0  # the least top of the scale: charts side by side have the same scale

    @property
    def highest_value(self) -> float:
        return max((each for each in self.high if each is not None), default=0.0)

    @property
    def top(self) -> float:
        """The highest value of the scale."""
        return max(self.highest_value, self.at_least)

    def describe(self, step: int) -> str | None:
        """Describe the values at a step; None without samples."""
        low, middle, high = self.low[step], self.middle[step], self.high[step]
        if low is None or middle is None or high is None:
            return None
        to_text = self.metric.format
        span = f" ({to_text(low)} to {to_text(high)})" if to_text(low) != to_text(high) else ""
        return f"{self.metric.title}: {to_text(middle)}{span}"


def _build_panels(run: PageRun) -> Iterator[_Panel]:
    for panel in _PANELS:
        columns = zip(*metric_over_time(run, panel.field, CHART_STEPS, of_gpus=panel.of_gpus).values(), strict=True)
        known = [sorted(value for value in column if value is not None) for column in columns]
        if any(values and values[-1] > 0 for values in known):
            low, high = ([values[place] if values else None for values in known] for place in (0, -1))
            yield _Panel(panel, low, [median(values) if values else None for values in known], high)


def find_highest_values(runs: Iterable[PageRun]) -> dict[str, float]:
    """Return the highest value of each metric in several runs, by its title."""
    found: dict[str, float] = {}
    for panel in (panel for run in runs for panel in _build_panels(run)):
        found[panel.metric.title] = max(panel.highest_value, found.get(panel.metric.title, 0.0))
    return found


def charts(run: PageRun, scales: Mapping[str, float] = {}) -> Mapping[str, object] | None:
    """Return the charts of a run; None without samples. ``scales``: the least top value of a scale, by title."""
    panels = [each._replace(at_least=scales.get(each.metric.title, 0.0)) for each in _build_panels(run)]
    if not panels:
        return None
    step = _HEIGHT + _TITLE + _GAP
    height = step * len(panels)
    labels = [
        (text, step * place + _TITLE + y)
        for place, panel in enumerate(panels)
        for text, y in ((panel.metric.format(panel.top), 10), ("0", _HEIGHT))
    ]
    restarts = [each for each in run.attempts if each.number]
    legend = ["The line is the median of the ranks, the band goes from the lowest to the highest."]
    legend += ["A dashed line is a restart."] * bool(restarts) + ["Grey: stalled."] * bool(run.stalls)
    return {
        "legend": " ".join(legend),
        "height": height,
        "labels": labels,
        "labels_width": LABELS,
        "steps": CHART_STEPS,
        "stalls": [_build_stall_band(run, *stall, height) for stall in run.stalls],
        "panels": [_draw_panel(panel, step * place) for place, panel in enumerate(panels)],
        "restarts": [(at(run, each.began), f"attempt {each.number} began") for each in restarts],
        "tooltips": [*_build_tooltips(panels, run.total, height)],
    }


def _draw_panel(panel: _Panel, y: int) -> Mapping[str, object]:
    to_text = panel.metric.format
    known = [each for each in panel.middle if each is not None]
    title = f"{panel.metric.title}: {to_text(median(known))}, at most {to_text(panel.highest_value)}"
    line, band = _line_path(panel.middle, panel.top), _band_path(panel.low, panel.high, panel.top)
    return {"title": title, "y": y, "line": line, "band": band}


def _build_stall_band(run: PageRun, began: float, ended: float, height: int) -> Box:
    left, right = run.percent_at(began), run.percent_at(ended)
    title = f"stalled for {format_elapsed(ended - began)}"
    return Box(title, f"{left:.2f}%", f"{max(right - left, 0.2):.2f}%", 0, height)


def _build_tooltips(panels: Sequence[_Panel], total: float, height: int) -> Iterator[Box]:
    """Yield transparent stripes whose tooltips have the values at their middles."""
    for place in range(HOVER_STRIPES):
        step = CHART_STEPS * (2 * place + 1) // (2 * HOVER_STRIPES)
        texts = [text for panel in panels if (text := panel.describe(step))]
        if texts:
            width = 100 / HOVER_STRIPES
            title = "\n".join([f"after {format_elapsed(total * (step + 0.5) / CHART_STEPS)}", *texts])
            yield Box(title, f"{place * width:.2f}%", f"{width:.2f}%", 0, height)


def sparklines(run: PageRun, field: str) -> Mapping[int, str]:
    """Return the SVG path of a small chart of a metric for each rank that has samples, all on one scale."""
    found = metric_over_time(run, field, SPARKLINE_STEPS)
    top = max((each for values in found.values() for each in values if each is not None), default=0.0)
    return {rank: _line_path(values, top) for rank, values in found.items() if top}


def _line_path(values: Values, top: float) -> str:
    """Return the SVG path of a line, with a part for each row of consecutive steps with values."""
    parts = []
    for first, heights in _split_known_steps(values, top):
        corners = [(y, first + place + 1) for place, y in enumerate(heights)]
        parts.append(f"M{first} {heights[0]}{_step_path(corners)}")
    return "".join(parts)


def _band_path(low: Values, high: Values, top: float) -> str:
    """Return the SVG path of the area between two lines, which have values at the same steps."""
    parts = []
    for (first, lower), (_, upper) in zip(_split_known_steps(low, top), _split_known_steps(high, top), strict=True):
        there = [(y, first + place + 1) for place, y in enumerate(upper)]
        back = [(y, first + place) for place, y in enumerate(lower)][::-1]
        parts.append(f"M{first} {upper[0]}{_step_path(there)}{_step_path(back)}Z")
    return "".join(parts)


def _split_known_steps(values: Values, top: float) -> Iterator[tuple[int, list[int]]]:
    """Yield each row of consecutive steps with values: its first step, and the height at each of its steps."""
    place = 0
    for known, group in groupby(values, lambda value: value is not None):
        part = [*group]
        if known:
            yield place, [round(100 - 98 * (value or 0.0) / (top or 1.0)) for value in part]
        place += len(part)


def _step_path(corners: Sequence[tuple[int, int]]) -> str:
    """Return the SVG path along these corners; corners of equal height are one segment."""
    return "".join(f"V{y}H{x}" for (y, x), (after, _) in pairwise([*corners, (-1, 0)]) if y != after)
