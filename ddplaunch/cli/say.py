"""Writes what ddplaunch itself says before and after a job, and plain results; while a job runs, the screen does."""

from __future__ import annotations

import os
import sys

from ddplaunch.console import colour_wanted
from ddplaunch.output.voice import VOICE, Said, Topic


def say(said: Said) -> None:
    """Write it to stderr; colours only where it is a terminal that may have them."""
    echo(VOICE.form(said), err=True)


def say_note(text: str, **fields: object) -> None:
    """Say something that people should know."""
    say(Said(Topic.NOTE, text, fields))


def fitted(line: str, taken: int) -> str:
    """Break a line between words where it goes to a terminal, which would break it anywhere; ``taken`` columns are."""
    try:
        columns = os.get_terminal_size(2).columns if sys.stderr.isatty() else 0
    except OSError:
        columns = 0
    if columns < 40 or taken + len(line) <= columns:
        return line
    import textwrap

    first = " " * taken
    wrapper = textwrap.TextWrapper(columns, first, "  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line).removeprefix(first)


def echo(text: str, *, err: bool = False) -> None:
    """Write a text to stdout or stderr, with its colours only where they may be; click does what is not plain."""
    stream = sys.stderr if err else sys.stdout
    if "\x1b" in text or (stream.encoding or "").lower() != "utf-8":
        import click

        click.echo(text, err=err, nl=False, color=None if colour_wanted() else False)
    else:
        stream.write(text)
        stream.flush()
