"""The section of the page with the last output lines of each rank, failed ranks first."""

from __future__ import annotations

from ddplaunch.base.errors import escape_control_chars, truncate_line
from ddplaunch.base.text import format_count
from ddplaunch.features.inspect.diagnosis.waits import find_waits
from ddplaunch.features.runs.html_report.html import Markup, concat, element, escape, section_with_heading
from ddplaunch.features.runs.html_report.page_run import PageRun

MAX_BYTES = 400 << 10  # of all ranks together
MAX_BYTES_PER_RANK, _LEAST = 48 << 10, 512  # bytes of a rank; of as many ranks as there is room for
_LINE = 2000  # characters
_MANY, _FIRST = 16, 8  # with more ranks than _MANY, only the _FIRST are visible without unfolding
_OPEN = 1  # ranks whose lines are unfolded at first


def output_section(run: PageRun) -> Markup | None:
    """Build the section; None without output."""
    printed = run.inputs.printed
    if not printed:
        return None
    first = _first_ranks(run)
    order = sorted(printed, key=lambda rank: (first.index(rank) if rank in first else len(first), rank))
    shown = order[: MAX_BYTES // _LEAST]
    room = min(MAX_BYTES_PER_RANK, MAX_BYTES // len(shown))
    blocks = [_block(rank, printed[rank], room, run, unfolded=place < _OPEN) for place, rank in enumerate(shown)]
    if len(blocks) > _MANY:
        others = element("summary", format_count(len(blocks) - _FIRST, "other rank"))
        blocks = [*blocks[:_FIRST], element("details", others, *blocks[_FIRST:], id="others")]
    left = f"and {format_count(len(order) - len(shown), 'rank')} more: ddplaunch logs"
    more = [element("p", left, class_="dim")] if len(order) > len(shown) else []
    words = {"type": "search", "placeholder": "search the lines of all ranks", "aria_label": "Search"}
    field = element("input", id="search", hidden="", autocomplete="off", **words)
    before = run.inputs.printed_in is not None and run.attempts and run.inputs.printed_in < run.attempts[-1].number
    when = [element("span", f", in attempt {run.inputs.printed_in}", class_="dim")] if before else []
    return section_with_heading(concat("Last lines of the ranks", *when), field, *blocks, *more, id="output")


def _first_ranks(run: PageRun) -> list[int]:
    """The ranks that matter most: those that failed by themselves, else those for which the others waited."""
    seen = next((share.inspections[-1] for share in run.shares if share.inspections), None)
    awaited = [rank for wait in find_waits(seen) for rank in wait.roots] if seen else []
    failed = [*run.inputs.failed_first]
    failed_by_itself = run.verdict is not None and not (run.verdict.blame or run.verdict.first.is_secondary)
    return failed + awaited if failed_by_itself else awaited + failed


def _block(rank: int, data: bytes, room: int, run: PageRun, *, unfolded: bool) -> Markup:
    lines = _lines(data, room)
    host = run.hosts.get(rank, "")
    failed = " failed" if rank in run.inputs.failed_first else ""
    about = f"{f' on {host}' if host else ''}{failed}, {format_count(len(lines), 'line')}"
    head = element("summary", element("b", f"rank {rank}"), about, element("i"))
    return element("details", head, element("pre", "\n".join(lines)), open="" if unfolded else None)


def _lines(data: bytes, room: int) -> list[str]:
    """Return the last lines that fit into ``room`` bytes of HTML; of a progress bar its last state."""
    found: list[str] = []
    longest = min(_LINE, room // 8)  # a character may be as long as "&quot;" there
    for line in reversed(data[-room:].decode(errors="replace").rstrip("\n").split("\n")):
        text = truncate_line(escape_control_chars(line.rstrip("\r").rpartition("\r")[2]), longest)
        room -= len(escape(text)) + 1
        if room < 0:
            break
        found.append(text)
    return found[::-1]
