"""``ddplaunch report --html FILE``: the page of a run, written where the user wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ddplaunch.errors import UsageError, shown

if TYPE_CHECKING:
    from ddplaunch.job.record import Record

STDOUT = "-"


def write_page(shares: Sequence[Record], file: str) -> None:
    """Write the page of a run from the records of its nodes; a file that is there already is replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    from ddplaunch.commands.runs.page import page

    text = page(shares)
    if file == STDOUT:
        return click.echo(text, nl=False)
    try:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a file"
        raise UsageError(f"--html {shown(file)}: {why}", "name a file that you may write to, or - for stdout") from None
    click.echo(f"written: {file}")
