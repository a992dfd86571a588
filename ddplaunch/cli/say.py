"""Writes what ddplaunch itself says before and after a job, and plain results; while a job runs, the screen does."""

from __future__ import annotations

import os
import re
import sys

from ddplaunch.console import is_colour_allowed
from ddplaunch.errors import EXIT_USAGE, sanitize_line
from ddplaunch.output.voice import FORMATTER, LogMessage, MessageKind

MAX_MESSAGE_CHARS = 500
MAX_HINT_CHARS = 4000  # it may be a command to copy
_LONG_WORD = r"(\S{100})\S{99,}?(:?)(?!\S)"  # too long to be read to its end, and a colon behind it


def print_message(said: LogMessage) -> None:
    """Write it to stderr; colours only where it is a terminal that may have them."""
    write_text(FORMATTER.format(said), err=True)


def print_note(text: str, **fields: object) -> None:
    """Say something that people should know."""
    print_message(LogMessage(MessageKind.NOTE, text, fields))


def print_notes(*texts: str) -> None:
    for text in texts:
        print_note(text)


def print_error(message: str, hint: str | None, code: int = EXIT_USAGE) -> None:
    """Print what is wrong: a line, and at most two of what to do; what was typed may be of any length, or harmful.

    ``code`` is the exit code that follows.
    """
    said = sanitize_line(re.sub(_LONG_WORD, r"\1…\2", message), MAX_MESSAGE_CHARS)
    hints = [sanitize_line(line, MAX_HINT_CHARS) for line in (hint or "").splitlines()[:2]]
    lines = f"\x1b[31m\x1b[1mError:\x1b[0m {wrap_to_terminal(said, len('Error: '))}\n" + "".join(
        f"  {line}\n" for line in hints
    )
    print_message(LogMessage(MessageKind.ERROR, said, {"hint": "\n".join(hints) or None, "code": code}, lines))


def wrap_to_terminal(line: str, used_columns: int) -> str:
    """Break a line between words where it goes to a terminal, which would break it anywhere; ``used_columns`` columns are."""
    try:
        columns = os.get_terminal_size(2).columns if sys.stderr.isatty() else 0
    except OSError:
        columns = 0
    if columns < 40 or used_columns + len(line) <= columns:
        return line
    import textwrap

    first = " " * used_columns
    wrapper = textwrap.TextWrapper(columns, first, "  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line).removeprefix(first)


def write_text(text: str, *, err: bool = False) -> None:
    """Write a text to stdout or stderr, with its colours only where they may be; click does what is not plain.

    A message that stderr does not take is lost: the exit code is not for that to decide.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        if "\x1b" in text or (stream.encoding or "").lower() != "utf-8":
            import click

            click.echo(text, err=err, nl=False, color=None if is_colour_allowed() else False)
        else:
            stream.write(text)
            stream.flush()
    except OSError:  # no reader is left, the terminal has gone, the disk is full
        if not err:
            raise
