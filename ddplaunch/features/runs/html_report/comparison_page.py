"""The page that compares runs: the tables, and the charts of all runs side by side, on the same scales."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.features.runs.html_report import charts, timeline
from ddplaunch.features.runs.html_report.page_run import PageRun
from ddplaunch.features.runs.html_report.template import STYLE, load_template

LEGEND = (
    "Each metric has one scale for all runs; time goes from the beginning of each run to its end. "
    "The line is the median of the ranks, the band goes from the lowest to the highest."
)


def render_comparison(
    runs: Sequence[PageRun],
    differs: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    notes: Sequence[str],
    policy: str,
) -> str:
    """Return the page; ``differs`` and ``results``: the rows of the tables, the first cell is the row's name."""
    scales = charts.find_highest_values(runs)
    names = [run.name for run in runs]
    return load_template("comparison.html.jinja").render(
        title=" and ".join(names) if len(names) == 2 else f"{len(names)} runs",
        heads=["", *names],
        notes=notes,
        differs=differs,
        results=results,
        legend=LEGEND,
        columns=[(run.name, charts.charts(run, scales), [*timeline.axis_ticks(run.total)]) for run in runs],
        policy=policy,
        style=STYLE,
    )
