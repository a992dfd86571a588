"""What each rank used: peak memory and CPU time, by the kernel's own accounts."""

from __future__ import annotations

from statistics import median

from ddplaunch.commands.runs.page.markup import Markup, joined, table, tag
from ddplaunch.commands.runs.page.run import Row, Run
from ddplaunch.dataclass import dataclass
from ddplaunch.words import size, span

_FOLDED = 32  # ranks from which on the table is folded


@dataclass(frozen=True)
class Usage:
    """One rank over all of its attempts."""

    last: Row
    peak: int  # bytes; 0 where it is not known
    cpu: float  # seconds
    lived: float  # seconds


def section(run: Run) -> Markup | None:
    """The resources; None where nothing is known of them."""
    used = [each for each in _usages(run) if each.peak or each.cpu]
    if not used:
        return None
    rows = table(["rank", "host", "peak memory", "CPU time", "CPUs", "end"], _rows(used))
    folded = tag("details", tag("summary", f"All {len(used)} ranks"), rows) if len(used) > _FOLDED else rows
    return tag("section", tag("h2", "Resources"), tag("ul", *_summary(used)), folded, id="resources")


def _usages(run: Run) -> list[Usage]:
    rows: dict[int, list[Row]] = {}
    for each in run.tries:
        for row in each.rows:
            rows.setdefault(row.rank.rank, []).append(row)
    return [_usage(rows[number], run) for number in sorted(rows)]


def _usage(rows: list[Row], run: Run) -> Usage:
    known = [row.rank for row in rows]
    lived = sum((rank.ended or run.ended) - rank.started for rank in known if rank.started)
    return Usage(rows[-1], max(rank.peak_memory for rank in known), sum(rank.cpu for rank in known), lived)


def _summary(used: list[Usage]) -> list[Markup]:
    most = max(used, key=lambda each: each.peak)
    busiest = max(used, key=lambda each: each.cpu)
    cpu = sum(each.cpu for each in used)
    lines = []
    if most.peak:
        middle = int(median(each.peak for each in used))
        lines.append(f"Peak memory: {size(most.peak)} (rank {most.last.rank.rank}), {size(middle)} in the median")
    if busiest.cpu:
        lines.append(f"CPU time: {span(cpu)} in all, {span(busiest.cpu)} at most (rank {busiest.last.rank.rank})")
    return [tag("li", line) for line in lines]


def _rows(used: list[Usage]) -> list[list[str]]:
    memory, cpu = max(each.peak for each in used), max(each.cpu for each in used)
    return [
        [
            str(each.last.rank.rank),
            each.last.rank.host or "–",
            _bar(size(each.peak) if each.peak else "–", each.peak / memory if memory else 0),
            _bar(span(each.cpu), each.cpu / cpu if cpu else 0),
            f"{each.cpu / each.lived:.1f}" if each.lived else "–",
            each.last.words,
        ]
        for each in used
    ]


def _bar(text: str, share: float) -> Markup:
    """A number with a bar that compares it to the largest."""
    bar = tag("span", tag("i", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%"), class_="meter")
    return joined(bar, text)
