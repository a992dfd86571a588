"""The last output lines of each rank, failed ranks first."""

from __future__ import annotations

import html
from collections.abc import Mapping

from ddplaunch.base.errors import escape_control_chars, truncate_line
from ddplaunch.base.text import format_count
from ddplaunch.features.runs.html_report.page_run import PageRun
from ddplaunch.observe.diagnosis.waits import find_waits

MAX_BYTES = 400 << 10  # of all ranks together
MAX_BYTES_PER_RANK, _LEAST = 48 << 10, 512  # the most and the least for a rank; ranks without room are left out
_LINE = 2000  # characters
_MANY, _FIRST = 16, 8  # with more ranks than _MANY, only the _FIRST are visible without unfolding
_OPEN = 1  # ranks whose lines are unfolded at first


def output(run: PageRun) -> Mapping[str, object] | None:
    """Return the section with the last output of the ranks; None if there is no output."""
    printed = run.inputs.printed
    if not printed:
        return None
    first = _ranks_to_show_first(run)
    order = sorted(printed, key=lambda rank: (first.index(rank) if rank in first else len(first), rank))
    shown = order[: MAX_BYTES // _LEAST]
    room = min(MAX_BYTES_PER_RANK, MAX_BYTES // len(shown))
    blocks = [_build_block(rank, printed[rank], room, run, is_open=place < _OPEN) for place, rank in enumerate(shown)]
    visible = _FIRST if len(blocks) > _MANY else len(blocks)
    left_out = len(order) - len(shown)
    attempt = run.inputs.printed_in
    is_earlier = attempt is not None and run.attempts and attempt < run.attempts[-1].number
    return {
        "attempt": attempt if is_earlier else None,
        "first": blocks[:visible],
        "others": blocks[visible:],
        "others_title": format_count(len(blocks) - visible, "other rank"),
        "left_out": f"and {format_count(left_out, 'rank')} more: ddplaunch logs" if left_out else "",
    }


def _ranks_to_show_first(run: PageRun) -> list[int]:
    """Return the ranks to show first: failed ones, then awaited ones; in the other order if none failed by itself."""
    seen = next((share.inspections[-1] for share in run.shares if share.inspections), None)
    awaited = [rank for wait in find_waits(seen) for rank in wait.root_causes] if seen else []
    failed = [*run.inputs.failed_first]
    failed_by_itself = run.verdict is not None and not (run.verdict.blame or run.verdict.first.is_secondary)
    return failed + awaited if failed_by_itself else awaited + failed


def _build_block(rank: int, data: bytes, room: int, run: PageRun, *, is_open: bool) -> Mapping[str, object]:
    lines = _lines(data, room)
    host = run.hosts.get(rank, "")
    failed = " failed" if rank in run.inputs.failed_first else ""
    about = f"{f' on {host}' if host else ''}{failed}, {format_count(len(lines), 'line')}"
    return {"rank": rank, "about": about, "text": "\n".join(lines), "is_open": is_open}


def _lines(data: bytes, room: int) -> list[str]:
    """Return the last lines that fit into ``room`` bytes of HTML; of a progress bar its last state."""
    lines: list[str] = []
    longest = min(_LINE, room // 8)  # a character may be as long as "&quot;" there
    for line in reversed(data[-room:].decode(errors="replace").rstrip("\n").split("\n")):
        text = truncate_line(escape_control_chars(line.rstrip("\r").rpartition("\r")[2]), longest)
        room -= len(html.escape(text)) + 1
        if room < 0:
            break
        lines.append(text)
    return lines[::-1]
