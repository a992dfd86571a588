"""Every error that a user can meet, with its exit code and its hint; the CLI prints them and nothing else does.

The exit codes are those that the launcher itself chooses; docs/reference.md quotes the text below each.
"""

from __future__ import annotations

import os

EXIT_USAGE = 2
"""A command that makes no sense, refused before anything starts (the shells' and click's convention)."""

EXIT_UNAVAILABLE = 69
"""A node could not be reached, never joined or was lost (EX_UNAVAILABLE of sysexits.h)."""

EXIT_SOFTWARE = 70
"""A bug of ddplaunch's own (EX_SOFTWARE of sysexits.h)."""

EXIT_OS = 71
"""The system refused to start a rank: a limit on processes, open files or memory (EX_OSERR of sysexits.h)."""

EXIT_OUTPUT = 74
"""All ranks have ended with 0, but what they, or a command, printed could not be written (EX_IOERR of sysexits.h)."""

EXIT_PREEMPTED = 75
"""The job had to make room for another; the same may be tried again (EX_TEMPFAIL of sysexits.h)."""

EXIT_TIMEOUT = 124
"""A time limit was over: --timeout, --stall-timeout or --straggler-timeout (the exit code of timeout(1))."""

EXIT_SIGNAL = 128
"""Added to the number of the signal that ended the job, as shells do: 130 is Ctrl-C, 143 SIGTERM, 137 SIGKILL."""


class LaunchError(Exception):
    """Something a user can mend: what was wrong, with the values compared, and what to type instead.

    Printed as at most three lines, never with a traceback of ours.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LaunchError):
    """The command makes no sense as typed, on this machine; refused before anything starts."""

    exit_code = EXIT_USAGE


MAX_TEXT_CHARS = 64 << 10  # characters of a message or traceback that are kept
MAX_LINE_CHARS = 1000  # characters of a line: a hint, or one of the last that a rank printed
MAX_TAIL_LINES = 12  # lines that are kept of the last that a rank printed

_SGR_SEQUENCES = r"\x1b\[[0-9;:]*m"  # what sets colours and weights in a terminal (SGR of ECMA-48), and nothing else
_CONTROL_CHARS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # directions of writing, ends of lines
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # what nobody sees, or UTF-8 cannot say
)
"""Characters that do something to a terminal, or let a text pass for another."""


def escape_control_chars(text: str) -> str:
    """Make a text that is not ours fit to be printed: without colours, other control characters as their escapes.

    Its lines then end in ``\\n`` alone, for ``str.splitlines`` and terminals alike.
    """
    import re

    plain = re.sub(_SGR_SEQUENCES, "", text.replace("\r\n", "\n"))
    return re.sub(_CONTROL_CHARS, lambda found: found[0].encode("unicode_escape").decode(), plain)


def sanitize_text(text: str) -> str:
    """What a rank said, fit to be printed on any node: harmless, and the middle of a huge text left out."""
    text = escape_control_chars(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = (MAX_TEXT_CHARS - 100) // 2  # so that what comes out, with its remark, is not huge for the next node
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def sanitize_line(text: str, limit: int = 200) -> str:
    """Make a value that is not ours fit for a line of ours: as :func:`harmless`, on one line, ``limit`` characters."""
    line = (
        escape_control_chars(text[: 8 * limit]).strip("\n").replace("\n", "\\n")
    )  # no more of a huge one need be looked at
    return truncate_line(line, limit)


def truncate_line(line: str, limit: int) -> str:
    """Shorten a line to ``limit`` characters, between two words; within one only where it fills half of the line."""
    if len(line) <= limit:
        return line
    kept = line[: limit - 1]
    if not line[limit - 1].isspace() and (space := kept.rfind(" ")) >= limit // 2:
        kept = kept[:space]
    return kept.rstrip(" .,:;") + "…"


def host_name() -> str:
    """The name of this machine, fit to be printed and recorded: root may set it to any bytes."""
    name = os.uname().nodename
    return name if name.isprintable() else sanitize_line(name)


def format_trace(error: Exception) -> str:
    """The traceback of an exception, as Python prints it."""
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
