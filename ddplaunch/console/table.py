"""A table as lines of text, for any command that prints one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str | None] = ()) -> Iterator[str]:
    """Columns, each as wide as it must be; ``colours`` are those of the second one in each row."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for number, row in enumerate([heads, *rows]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1]
        if number and colours and (colour := colours[number - 1]):
            cells[1] = click.style(cells[1], fg=colour)
        line = "  ".join(cells).rstrip()
        yield line if number else click.style(line, bold=True)
