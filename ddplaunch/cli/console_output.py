"""Prints ddplaunch's own messages before and after a job, and results; while a job runs, the screen prints them."""

from __future__ import annotations

import os
import re
import sys
import textwrap

import click

from ddplaunch.base.errors import EXIT_USAGE, sanitize_line
from ddplaunch.core.output.log_message import FORMATTER, LogMessage, MessageKind

MAX_MESSAGE_CHARS = 500
MAX_HINT_CHARS = 4000  # it may be a command to copy
_LONG_WORD = r"(\S{100})\S{99,}?(:?)(?!\S)"  # a word of 200 characters or more, with its colon


def is_colour_allowed() -> bool:
    """Whether the environment allows colour on a terminal (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_message(message: LogMessage) -> None:
    """Write a message to stderr, with colours only if stderr is a terminal that has them."""
    write_text(FORMATTER.format(message), err=True)


def print_note(text: str, **fields: object) -> None:
    """Print a note for the user."""
    print_message(LogMessage(MessageKind.NOTE, text, fields))


def print_notes(*texts: str) -> None:
    for text in texts:
        print_note(text)


def print_error(message: str, hint: str | None, code: int = EXIT_USAGE) -> None:
    """Print an error in one line, and a hint in at most two; quoted input is shortened and its control codes removed.

    ``code`` is the exit code that follows.
    """
    text = sanitize_line(re.sub(_LONG_WORD, r"\1…\2", message), MAX_MESSAGE_CHARS)
    hints = [sanitize_line(line, MAX_HINT_CHARS) for line in (hint or "").splitlines()[:2]]
    lines = f"\x1b[31m\x1b[1mError:\x1b[0m {wrap_to_terminal(text, len('Error: '))}\n" + "".join(
        f"  {line}\n" for line in hints
    )
    print_message(LogMessage(MessageKind.ERROR, text, {"hint": "\n".join(hints) or None, "code": code}, lines))


def wrap_to_terminal(line: str, used_columns: int) -> str:
    """Break a line between words if stderr is a terminal; its first row has only the columns after ``used_columns``."""
    try:
        columns = os.get_terminal_size(2).columns if sys.stderr.isatty() else 0
    except OSError:
        columns = 0
    if columns < 40 or used_columns + len(line) <= columns:
        return line

    first = " " * used_columns
    wrapper = textwrap.TextWrapper(columns, first, "  ", break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line).removeprefix(first)


def write_text(text: str, *, err: bool = False) -> None:
    """Write a text to stdout or stderr; click removes colours and converts encodings where necessary.

    A failure to write to stderr is ignored: it must not change the exit code.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        if "\x1b" in text or (stream.encoding or "").lower() != "utf-8":
            click.echo(text, err=err, nl=False, color=None if is_colour_allowed() else False)
        else:
            stream.write(text)
            stream.flush()
    except OSError:  # closed pipe or terminal, full disk
        if not err:
            raise
