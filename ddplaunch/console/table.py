"""A table as lines of text, for any command that prints one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ddplaunch.errors import truncate_line
from ddplaunch.words import columns

MIN_COLUMN_WIDTH = 10
"""Columns of the terminal for the last column of a table, however narrow it is."""

ROOM = 24
"""Those for which an optional column is left out."""


def fitting(line: str, limit: int) -> str:
    """Shorten a line to ``limit`` columns of a terminal."""
    length = limit
    while columns(shortened := truncate_line(line, length)) > limit:
        length -= 1
    return shortened


def format_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    colours: Sequence[str | None] = (),
    max_width: int | None = None,
    optional: Sequence[str] = (),
) -> Iterator[str]:
    """Columns, each as wide as it must be, the last one cut where a line would be longer than ``max_width``.

    ``colours`` are those of the second one in each row; of the columns ``optional``, in this order, those are left out
    that leave the last column too little room.
    """
    widths = [max(map(columns, column)) for column in zip(heads, *rows, strict=True)]
    left = None if max_width is None else max_width - sum(width + 2 for width in widths[:-1])
    if left is not None and left < min(ROOM, widths[-1]) and optional:
        at = [*heads].index(optional[0])
        rest = [[*row[:at], *row[at + 1 :]] for row in [heads, *rows]]
        yield from format_table(rest[0], rest[1:], colours, max_width, optional[1:])
        return
    left = None if left is None else max(MIN_COLUMN_WIDTH, left)
    for number, row in enumerate([heads, *rows]):
        cells = [cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1] if left is None else fitting(row[-1], left)
        if number and colours and (colour := colours[number - 1]):
            cells[1] = click.style(cells[1], fg=colour)
        line = "  ".join(cells).rstrip()
        yield line if number else click.style(line, bold=True)
