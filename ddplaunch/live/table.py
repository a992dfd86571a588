"""The table of ranks, a row for each: which columns fit, in which order the ranks stand, and drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from io import StringIO
from typing import NamedTuple

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ddplaunch.devices.gpu_usage import GpuUsage
from ddplaunch.devices.processes import ProcessUsage
from ddplaunch.diagnosis.inspection import RankInspection
from ddplaunch.errors import sanitize_line
from ddplaunch.live.rows import Row, StyledText
from ddplaunch.live.state import RankActivity

WIDE_COLUMNS = 100  # columns of a terminal from which there are two blanks between two columns of the table
_TEXTS = 20  # columns that the line and the output together must have
_WORDS = 40  # columns that they must have for what a rank does to be a word


class TableRow(NamedTuple):
    """What the table says of a rank; None where it is not known."""

    rank: RankInspection
    activity: RankActivity
    location: str  # what it does: the user's line, or what it waits in
    last_line: str  # its last line of output
    busy: float | None  # CPUs
    usage: ProcessUsage | None
    gpu: GpuUsage | None
    rate: float | None  # collectives a second
    lateness_s: float | None  # seconds


class TableColumn(NamedTuple):
    """A column of figures: its width, what it says, and by what ranks are put in order, the largest first."""

    width: int
    text: Callable[[TableRow], str]
    sort_key: Callable[[TableRow], float | None] = lambda line: None


def format_size_short(count: float | None) -> str:
    """Bytes in five characters at most: "592M", "1.4G"."""
    if count is None:
        return ""
    amount, unit = count / (1 << 20), "M"
    for larger in "GTP":
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f}{unit}" if unit != "M" and amount < 10 else f"{amount:.0f}{unit}"


def _rate(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:.1f}" if 0 < rate < 9.95 else f"{rate:.0f}" if rate < 100_000 else f"{rate / 1000:.0f}k"


def _late(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f}s" if seconds >= 0.9995 else f"{seconds * 1000:.0f}ms" if seconds >= 0.0005 else "0"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0f}"


def _memory(one: TableRow) -> float | None:
    return one.usage.memory if one.usage else None


def _gpu(one: TableRow) -> float | None:
    return one.gpu.busy if one.gpu else None


def _gpu_memory(one: TableRow) -> float | None:
    return one.gpu.memory_used if one.gpu else None


COLUMNS: Mapping[str, TableColumn] = {
    "CPU%": TableColumn(4, lambda one: _percent(None if one.busy is None else one.busy * 100), lambda one: one.busy),
    "late": TableColumn(5, lambda one: _late(one.lateness_s), lambda one: one.lateness_s),
    "coll/s": TableColumn(6, lambda one: _rate(one.rate), lambda one: one.rate),
    "mem": TableColumn(4, lambda one: format_size_short(_memory(one)), _memory),
    "GPU%": TableColumn(4, lambda one: _percent(_gpu(one)), _gpu),
    "GPUmem": TableColumn(6, lambda one: format_size_short(_gpu_memory(one)), _gpu_memory),
    "pid": TableColumn(7, lambda one: str(one.rank.pid or "")),
}
"""The columns of figures, the ones first that are left out last; one that is empty is left out."""

SORT_KEYS = ("rank", "state", *(name for name in COLUMNS if name != "pid"))
"""What the ranks can be in order of."""


def sort_rows(
    lines: Iterable[TableRow], by: str, weight: Callable[[TableRow], tuple[bool, int, int]]
) -> list[TableRow]:
    """Put the ranks in order: of their numbers, of what matters most (``weight``), or the largest figure first."""
    if by == "rank":
        return sorted(lines, key=lambda one: one.rank.rank)
    if by == "state":
        return sorted(lines, key=lambda one: (weight(one), one.rank.rank))
    figure = COLUMNS[by].sort_key
    return sorted(lines, key=lambda one: (-(figure(one) or 0.0), one.rank.rank))


def render_table(lines: Sequence[TableRow], limit: int, *, cursor: int | None = None) -> list[Row]:
    """The head and these ranks, in ``limit`` columns."""
    gap = "  " if limit >= WIDE_COLUMNS else " "
    number = max(len("rank"), *(len(str(one.rank.rank)) for one in lines)) if lines else 4
    hosts = {one.rank.host for one in lines}
    left = limit - number - len(gap) - 2
    figures: list[str] = []
    for name, column in COLUMNS.items():
        takes = max(column.width, len(name)) + len(gap)
        filled = any(column.text(one) for one in lines)
        least = _WORDS + 10 if name == "pid" else _TEXTS if name in ("CPU%", "late") else _WORDS - 4
        if filled and left - takes >= least - len(gap):
            figures.append(name)
            left -= takes
    in_words = left - len("starting") + 1 >= _WORDS - 4
    host = min(20, max(map(len, hosts))) if len(hosts) > 1 and left >= 2 * _WORDS else 0

    def fixed(rank: str, what: str, host_name: str, cells: Iterable[str]) -> str:
        parts = [rank.rjust(number), what, *([sanitize_line(host_name, host).ljust(host)] if host else []), *cells]
        return gap.join(parts)

    wide = len("starting") if in_words else 1
    table = Table(box=None, padding=(0, len(gap), 0, 0), pad_edge=False, expand=True, width=limit, header_style="dim")
    widths = [max(COLUMNS[name].width, len(name)) for name in figures]
    heads = [name.rjust(width) for name, width in zip(figures, widths, strict=True)]
    table.add_column(fixed("rank", "is".ljust(wide) if in_words else " ", "host", heads), no_wrap=True)
    table.add_column("does", ratio=1, no_wrap=True)
    if outputs := any(one.last_line for one in lines) and left >= _WORDS - 8:
        table.add_column("last line", ratio=1, no_wrap=True)
    for one in lines:
        cells = [COLUMNS[name].text(one).rjust(width) for name, width in zip(figures, widths, strict=True)]
        what = (one.activity.word if in_words else one.activity.sign).ljust(wide)
        first = Text(fixed(str(one.rank.rank), what, one.rank.host, cells))
        first.stylize(_to_rich_style(one.activity.style), number + len(gap), number + len(gap) + wide)
        texts = [first, Text(one.location), *([Text(one.last_line)] if outputs else [])]
        table.add_row(*texts, style="reverse" if one.rank.rank == cursor else "")
    console = Console(file=StringIO(), width=limit, force_terminal=True, color_system="standard", legacy_windows=False)
    found = console.render_lines(table, console.options.update(width=limit), pad=False)
    return [tuple(StyledText(segment.text, _from_rich_style(segment.style)) for segment in line) for line in found]


@cache
def _to_rich_style(sgr: str) -> Style:
    """A style of ours as rich has it."""
    spans = Text.from_ansi(f"\x1b[{sgr}mx\x1b[0m").spans
    return Style.parse(str(spans[0].style)) if spans else Style.null()


@cache
def _from_rich_style(style: Style | None) -> str:
    """A style of rich as the parameters of SGR."""
    said = style.render("x", color_system=ColorSystem.STANDARD) if style else "x"
    return said.partition("m")[0].removeprefix("\x1b[") if said.startswith("\x1b") else ""
