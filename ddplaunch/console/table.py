"""A table as lines of text, for any command that prints one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ddplaunch.errors import cut
from ddplaunch.words import columns

LEAST = 10
"""Characters of the last column that stay however narrow a terminal is."""


def fitting(line: str, limit: int) -> str:
    """Shorten a line to ``limit`` columns of a terminal."""
    length = limit
    while columns(shortened := cut(line, length)) > limit:
        length -= 1
    return shortened


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str | None] = (), across: int | None = None
) -> Iterator[str]:
    """Columns, each as wide as it must be, the last one cut where a line would be longer than ``across``.

    ``colours`` are those of the second one in each row.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    left = None if across is None else max(LEAST, across - sum(width + 2 for width in widths[:-1]))
    for number, row in enumerate([heads, *rows]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1] if left is None else cut(row[-1], left)
        if number and colours and (colour := colours[number - 1]):
            cells[1] = click.style(cells[1], fg=colour)
        line = "  ".join(cells).rstrip()
        yield line if number else click.style(line, bold=True)
