"""The table of programs beside the ranks in the full screen of the live view."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.text import format_elapsed
from ddplaunch.features.live.rank_table import WIDE_COLUMNS, format_size_short
from ddplaunch.features.live.styled_rows import Row, StyledText, truncate_row
from ddplaunch.features.live.view_state import ViewState
from ddplaunch.observe.diagnosis.inspection import ProgramInspection
from ddplaunch.observe.diagnosis.program_text import programs_with_usage
from ddplaunch.system.devices.gpu_usage import GpuUsage

MAX_PROGRAM_ROWS = 8  # programs that are not ready come first
_MAX_NAME = 20
_MIN_TEXT = 16  # columns: with fewer, the last line of output is left out


class ProgramRow(NamedTuple):
    """A row of the table: one program, and the usage of its GPUs."""

    program: ProgramInspection
    gpus: Sequence[GpuUsage]


def _format_mean_gpu_busy(gpus: Sequence[GpuUsage]) -> str:
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    return f"{sum(busy) / len(busy):.0f}" if busy else ""


def _format_gpu_memory(gpus: Sequence[GpuUsage]) -> str:
    used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
    return format_size_short(sum(used)) if used else ""


COLUMNS: Mapping[str, Callable[[ProgramRow], str]] = {
    "for": lambda one: format_elapsed(max(0.0, time.time() - one.program.since)),
    "CPU%": lambda one: "" if one.program.busy is None else f"{one.program.busy * 100:.0f}",
    "mem": lambda one: format_size_short(one.program.memory) if one.program.memory else "",
    "GPU%": lambda one: _format_mean_gpu_busy(one.gpus),
    "GPUmem": lambda one: _format_gpu_memory(one.gpus),
    "silent": lambda one: "" if one.program.quiet is None else format_elapsed(one.program.quiet),
}
"""The columns; those that are empty in all rows are left out."""


def render_programs(view: ViewState, limit: int) -> list[Row]:
    """Render the header and a row for each program; nothing without programs."""
    now, previous = view.current.inspection, view.previous
    if not now.programs:
        return []
    programs = programs_with_usage(now, previous.inspection, {}) if previous else now.programs
    if len(programs) > MAX_PROGRAM_ROWS:
        programs = tuple(sorted(programs, key=lambda each: each.state == "ready"))
    rows = [ProgramRow(each, view.program_gpus.get(each.program, ())) for each in programs[:MAX_PROGRAM_ROWS]]
    names = _align("program", [sanitize_line(one.program.program, _MAX_NAME) for one in rows], str.ljust)
    states = _align("is", [describe_state(one.program) for one in rows], str.ljust)
    columns = {name: [cell(one) for one in rows] for name, cell in COLUMNS.items()}
    numbers = [_align(name, column, str.rjust) for name, column in columns.items() if any(column)]
    gap = "  " if limit >= WIDE_COLUMNS else " "
    after = [gap.join(["", *cells, ""]) for cells in zip(*numbers, strict=True)]
    has_text = limit - len(names[0] + gap + states[0] + after[0]) >= _MIN_TEXT
    texts = ["last line", *(one.program.last_line.expandtabs() for one in rows)] if has_text else [""] * (len(rows) + 1)
    lines: list[Row] = [(StyledText(f"{names[0]}{gap}{states[0]}{after[0]}{texts[0]}", "2"),)]
    for one, name, state, cells, text in zip(rows, names[1:], states[1:], after[1:], texts[1:], strict=True):
        lines.append((StyledText(name + gap), StyledText(state, program_style(one.program)), StyledText(cells + text)))
    if len(programs) > len(rows):
        lines.append((StyledText(f"and {len(programs) - len(rows)} more programs", "2"),))
    return [truncate_row(line, limit) for line in lines]


def _align(head: str, cells: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    """Return the head and the cells of a column, all of the same width."""
    width = max(map(len, (head, *cells)))
    return [pad(each, width) for each in (head, *cells)]


def describe_state(program: ProgramInspection) -> str:
    """Return a program's state, with the exit code if it has ended: "ready", "ended (7)"."""
    return program.state if program.code is None else f"{program.state} ({program.code})"


def program_style(program: ProgramInspection) -> str:
    """Return the text style of a program's state: red where it has failed."""
    return "32" if program.state == "ready" else "1;31" if program.code else "33"
