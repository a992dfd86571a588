"""Formats tables as lines of text, for the commands that print one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

import click

from ddplaunch.base.errors import truncate_line
from ddplaunch.base.text import display_width

MIN_COLUMN_WIDTH = 10
"""Of the last column of a table, however narrow the terminal is."""

MIN_LAST_COLUMN_WIDTH = 24
"""Optional columns are left out to give the last column this width."""

_CALLED = re.compile(r"python \S*\bddplaunch-[^/]+/launch\.py:(\w+)( .*)?")


def short_target(target: str) -> str:
    """Shorten a target for a table: without "python"; for a call from Python, only the function's name."""
    if called := _CALLED.fullmatch(target):
        return f"{called[1]}()"
    return target.removeprefix("python ")


def fit_to_width(line: str, limit: int) -> str:
    """Shorten a line to ``limit`` columns of a terminal."""
    length = limit
    while display_width(shortened := truncate_line(line, length)) > limit:
        length -= 1
    return shortened


def format_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    colours: Sequence[str | None] = (),
    max_width: int | None = None,
    optional: Sequence[str] = (),
    *,
    wrap: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table: columns as wide as their cells, the last one cut to keep lines within ``max_width``.

    ``colours``: of the second column, for each row. ``optional``: columns to leave out, in this order, while the last
    column has less than ``MIN_LAST_COLUMN_WIDTH``. ``wrap``: the last column is wrapped, not cut.
    """
    widths = [max(map(display_width, column)) for column in zip(heads, *rows, strict=True)]
    left = None if max_width is None else max_width - sum(width + 2 for width in widths[:-1])
    if left is not None and left < min(MIN_LAST_COLUMN_WIDTH, widths[-1]) and optional:
        at = [*heads].index(optional[0])
        rest = [[*row[:at], *row[at + 1 :]] for row in [heads, *rows]]
        yield from format_table(rest[0], rest[1:], colours, max_width, optional[1:], wrap=wrap)
        return
    left = None if left is None else max(MIN_COLUMN_WIDTH, left)
    for number, row in enumerate([heads, *rows]):
        cells = [cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1]
        if left is not None:
            indent = "\n" + " " * sum(width + 2 for width in widths[:-1])
            cells[-1] = indent.join(textwrap.wrap(row[-1], left)) if wrap else fit_to_width(row[-1], left)
        if number and colours and (colour := colours[number - 1]):
            cells[1] = click.style(cells[1], fg=colour)
        line = "  ".join(cells).rstrip()
        yield line if number else click.style(line, bold=True)
