"""The launcher's exit codes, exceptions that carry an exit code and a hint, and functions that sanitize text.

docs/variables.md quotes the text below each exit code.
"""

from __future__ import annotations

import os
import re
import sys
import traceback

EXIT_USAGE = 2
"""Usage error; nothing was started."""

EXIT_UNAVAILABLE = 69
"""A node could not be reached, never joined or was lost (EX_UNAVAILABLE)."""

EXIT_SOFTWARE = 70
"""A bug of ddplaunch's own (EX_SOFTWARE)."""

EXIT_OS = 71
"""The system refused to start a rank: a limit on processes, open files or memory (EX_OSERR)."""

EXIT_OUTPUT = 74
"""All ranks ended with 0, but their output, or a command's, could not be written (EX_IOERR)."""

EXIT_PREEMPTED = 75
"""The job was preempted; the same command may be run again (EX_TEMPFAIL)."""

EXIT_TIMEOUT = 124
"""A time limit expired: --timeout, --stall-timeout or --straggler-timeout (the exit code of timeout(1))."""

EXIT_SIGNAL = 128
"""Added to the number of the signal that ended the job, as shells do: 130 is Ctrl-C, 143 SIGTERM, 137 SIGKILL."""


class LaunchError(Exception):
    """An error that a user can fix; the message states what is wrong, the hint what to do about it.

    Printed in at most three lines, without a traceback of ddplaunch.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.__notes__ = [hint]  # a traceback shows it below the message, since Python 3.11


class UsageError(LaunchError):
    """A usage error: the command is invalid on this machine; raised before anything starts."""

    exit_code = EXIT_USAGE


MAX_TEXT_CHARS = 64 << 10  # limit of a message or traceback; the middle of a longer one is left out
MAX_LINE_CHARS = 1000  # limit of one line: a hint, or one of a rank's last lines
MAX_TAIL_LINES = 12  # how many last lines of a rank's output its failure has

_SGR_SEQUENCES = r"\x1b\[[0-9;:]*m"  # colours and weights in a terminal (SGR of ECMA-48)
_CONTROL_CHARS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # writing directions, line ends
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # invisible, or not in UTF-8
)
"""Characters that control a terminal, or disguise a text."""


def escape_control_chars(text: str) -> str:
    """Make an untrusted text safe to print: remove colours, escape other control characters.

    Lines of the result end in ``\\n`` alone, so ``str.splitlines`` and terminals find the same lines.
    """
    plain = re.sub(_SGR_SEQUENCES, "", text.replace("\r\n", "\n"))
    return re.sub(_CONTROL_CHARS, lambda found: found[0].encode("unicode_escape").decode(), plain)


def sanitize_text(text: str) -> str:
    """Make an untrusted text of many lines safe to print, and leave out the middle of a huge one."""
    text = escape_control_chars(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = (MAX_TEXT_CHARS - 100) // 2  # so that the result, with its remark, is short enough for the next node
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def sanitize_line(text: str, limit: int = 200) -> str:
    """Make an untrusted value safe to print within a line: escaped, on one line, at most ``limit`` characters."""
    line = escape_control_chars(text[: 8 * limit]).strip("\n").replace("\n", "\\n")  # no more of a huge text is needed
    return truncate_line(line, limit)


def truncate_line(line: str, limit: int) -> str:
    """Shorten a line to ``limit`` characters, at a space if there is one in its second half."""
    if len(line) <= limit:
        return line
    kept = line[: limit - 1]
    if not line[limit - 1].isspace() and (space := kept.rfind(" ")) >= limit // 2:
        kept = kept[:space]
    return kept.rstrip(" .,:;") + "…"


def host_name() -> str:
    """The name of this machine, safe to print and record: root may set it to any bytes."""
    name = os.uname().nodename
    return name if name.isprintable() else sanitize_line(name)


def add_note(error: Exception, text: str) -> None:
    """Add a text that the traceback of an exception shows below its message."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


def format_trace(error: Exception) -> str:
    """The traceback of an exception, as Python prints it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    if sys.version_info < (3, 11) and not text.endswith(notes):  # it prints them only with the package exceptiongroup
        text += notes
    return text
