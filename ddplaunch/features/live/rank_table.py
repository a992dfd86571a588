"""The table of ranks in the live view: chooses the columns that fit, sorts the ranks, and renders it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.errors import sanitize_line
from ddplaunch.features.live.styled_rows import Row, StyledText, row_width, truncate_row
from ddplaunch.features.live.view_state import RankActivity
from ddplaunch.observe.diagnosis.inspection import RankInspection
from ddplaunch.system.devices.gpu_usage import GpuUsage
from ddplaunch.system.devices.process_usage import ProcessUsage

WIDE_COLUMNS = 100  # from this width of the terminal on, two columns of the table have two blanks between them
_MIN_TEXT_COLUMNS = 20  # for location and last output line together
_MIN_WORD_MODE_COLUMNS = 40  # for both, where the activity of a rank is a word instead of a sign


class TableRow(NamedTuple):
    """One row of the table of ranks: what one rank does and uses; a field is None where it is unknown."""

    rank: RankInspection
    activity: RankActivity
    location: str  # the user's line, or the collective or function in which the rank waits
    last_line: str  # its last line of output
    busy: float | None  # number of busy CPUs
    usage: ProcessUsage | None
    gpu: GpuUsage | None
    rate: float | None  # collectives a second
    lateness_s: float | None  # seconds


class TableColumn(NamedTuple):
    """A column of numbers in the rank table: its width, its value for a rank, and the text of a value."""

    width: int
    value: Callable[[TableRow], float | None]
    format: Callable[[float], str]

    def text(self, line: TableRow) -> str:
        value = self.value(line)
        return "" if value is None else self.format(value)


def format_size_short(count: float) -> str:
    """Format bytes in five characters at most: "592M", "1.4G"."""
    amount, unit = count / (1 << 20), "M"
    for larger in "GTP":
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f}{unit}" if unit != "M" and amount < 10 else f"{amount:.0f}{unit}"


def _format_rate(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < 9.95 else f"{rate:.0f}" if rate < 100_000 else f"{rate / 1000:.0f}k"


def _format_lateness(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds >= 0.9995 else f"{seconds * 1000:.0f}ms" if seconds >= 0.0005 else "0"


COLUMNS: Mapping[str, TableColumn] = {
    "CPU%": TableColumn(4, lambda one: one.busy, lambda cpus: f"{cpus * 100:.0f}"),
    "late": TableColumn(5, lambda one: one.lateness_s, _format_lateness),
    "coll/s": TableColumn(6, lambda one: one.rate, _format_rate),
    "mem": TableColumn(4, lambda one: one.usage.memory if one.usage else None, format_size_short),
    "GPU%": TableColumn(4, lambda one: one.gpu.busy if one.gpu else None, "{:.0f}".format),
    "GPUmem": TableColumn(6, lambda one: one.gpu.memory_used if one.gpu else None, format_size_short),
    "pid": TableColumn(7, lambda one: one.rank.pid or None, str),
}
"""The columns of numbers, by priority: the last ones are left out first, and empty ones always."""

SORT_KEYS = ("rank", "state", *(name for name in COLUMNS if name != "pid"))
"""The keys by which the ranks can be sorted."""


def sort_rows(
    lines: Iterable[TableRow], by: str, weight: Callable[[TableRow], tuple[bool, int, int]]
) -> list[TableRow]:
    """Sort the ranks by number, by importance of their activity (``weight``), or by a column, the largest first."""
    if by == "rank":
        return sorted(lines, key=lambda one: one.rank.rank)
    if by == "state":
        return sorted(lines, key=lambda one: (weight(one), one.rank.rank))
    value = COLUMNS[by].value
    return sorted(lines, key=lambda one: (-(value(one) or 0.0), one.rank.rank))


def render_table(lines: Sequence[TableRow], limit: int, *, cursor: int | None = None) -> list[Row]:
    """Render the header of the rank table and a row for each rank, at most ``limit`` columns wide."""
    gap = "  " if limit >= WIDE_COLUMNS else " "
    number = max(len("rank"), *(len(str(one.rank.rank)) for one in lines)) if lines else 4
    hosts = {one.rank.host for one in lines}
    left = limit - number - len(gap) - 2
    chosen: list[str] = []
    for name, column in COLUMNS.items():
        width = max(column.width, len(name)) + len(gap)
        has_values = any(column.text(one) for one in lines)
        special = {"pid": _MIN_WORD_MODE_COLUMNS + 10, "CPU%": _MIN_TEXT_COLUMNS, "late": _MIN_TEXT_COLUMNS}
        least = special.get(name, _MIN_WORD_MODE_COLUMNS - 4)
        if has_values and left - width >= least - len(gap):
            chosen.append(name)
            left -= width
    in_words = left - len("starting") + 1 >= _MIN_WORD_MODE_COLUMNS - 4
    host = min(20, max(map(len, hosts))) if len(hosts) > 1 and left >= 2 * _MIN_WORD_MODE_COLUMNS else 0

    def join_fixed_columns(rank: str, what: str, host_name: str, cells: Iterable[str]) -> str:
        parts = [rank.rjust(number), what, *([sanitize_line(host_name, host).ljust(host)] if host else []), *cells]
        return gap.join(parts)

    wide = len("starting") if in_words else 1
    widths = [max(COLUMNS[name].width, len(name)) for name in chosen]
    heads = [name.rjust(width) for name, width in zip(chosen, widths, strict=True)]
    head = join_fixed_columns("rank", "state".ljust(wide) if in_words else " ", "host", heads) + gap
    room = max(0, limit - len(head))
    outputs = any(one.last_line for one in lines) and left >= _MIN_WORD_MODE_COLUMNS - 8
    half = max(0, -(-room // 2) - len(gap)) if outputs else room

    def render_text_columns(location: str, last_line: str) -> Row:
        shown = truncate_row((StyledText(location.expandtabs()),), half)
        if not outputs:
            return shown
        blank = " " * (half - row_width(shown)) + gap
        return (*shown, StyledText(blank), *truncate_row((StyledText(last_line.expandtabs()),), room - half - len(gap)))

    rows: list[Row] = [
        tuple(span._replace(style="2") for span in (StyledText(head), *render_text_columns("doing", "last line")))
    ]
    for one in lines:
        cells = [COLUMNS[name].text(one).rjust(width) for name, width in zip(chosen, widths, strict=True)]
        what = (one.activity.word if in_words else one.activity.sign).ljust(wide)
        first = join_fixed_columns(str(one.rank.rank), what, one.rank.host, cells) + gap
        at = number + len(gap)
        parts = (StyledText(first[:at]), StyledText(what, one.activity.style), StyledText(first[at + wide :]))
        row: Row = (*parts, *render_text_columns(one.location, one.last_line))
        if one.rank.rank == cursor:
            row = (*row, StyledText(" " * (limit - row_width(row))))
            row = tuple(span._replace(style=f"{span.style};7".lstrip(";")) for span in row)
        rows.append(row)
    return [truncate_row(row, limit) for row in rows]
