"""Relays the launcher's output to the streams of the calling program, and collects ddplaunch's own messages."""

from __future__ import annotations

import contextvars
import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO

from msgspec import Struct

from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import convert
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.output.log_message import JSON_LINE_START

_CHUNK = 1 << 16


class LauncherMessage(Struct, frozen=True):
    """A message of the launcher (--log-json), with the fields that the caller needs."""

    kind: str  # a ``MessageKind``
    text: str
    hint: str | None = None  # only of an error
    problems: tuple[Mapping[str, str], ...] = ()  # why hosts cannot run the job: "host" and "text"
    failure: FailureReport | None = None


class OutputPrinter:
    """Prints the output of a launcher, one thread per stream, and collects its messages (--log-json)."""

    def __init__(self, output: IO[str] | None, mark: str) -> None:
        """``output``: for both streams; None: sys.stdout and sys.stderr. ``mark``: the beginning of a flush mark."""
        self._output, self._mark = output, re.compile(re.escape(mark) + r"(\d+)\n")
        self._marks_changed = threading.Condition()
        self._last_marks: dict[str, float] = {"stdout": 0, "stderr": 0}
        self.context = contextvars.copy_context()
        """Context of the waiting caller: in a notebook it decides to which cell output belongs."""
        self.on_note: Callable[[str], bool] = lambda text: False
        """Called with each note, in the reader thread; the note is not printed if it returns True."""
        self.stop: Callable[[], None] = lambda: None
        """Called once after the stream ``output`` has raised."""
        self.error: BaseException | None = None
        """The exception of the stream ``output``, for the caller; after it nothing is written to ``output``."""
        self.messages: list[LauncherMessage] = []

    def print_stream(self, pipe: IO[bytes], name: str) -> None:
        """Print the data of the launcher's stdout or stderr until its end."""
        rest = b""
        while data := os.read(pipe.fileno(), _CHUNK):
            lines, end, rest = (rest + data).rpartition(b"\n")
            self._print_lines((lines + end).decode(errors="replace"), name)
        self._print_lines(rest.decode(errors="replace"), name)
        self._on_mark(name, math.inf)

    def wait_for_mark(self, number: int, seconds: float) -> bool:
        """Wait until the mark with this number has arrived on stdout and stderr, or these have ended."""
        with self._marks_changed:
            return self._marks_changed.wait_for(lambda: min(self._last_marks.values()) >= number, seconds)

    def _print_lines(self, text: str, name: str) -> None:
        """Print the ranks' lines, and ddplaunch's notes as text."""
        lines: list[str] = []
        last_mark = 0
        for line in io.StringIO(text, newline="\n"):  # splits at \n only: ranks may print other line separators
            at = line.find(JSON_LINE_START) if name == "stderr" else -1
            if at >= 0 and (note := self._collect_message(line[at:])) is not None:
                # A job's only rank writes straight to this stream, and may not have ended its line (a progress bar).
                line = f"{line[:at]}\n{note}" if at else note
            elif at == 0:  # a truncated message
                continue
            elif mark := self._mark.search(line):
                line, last_mark = line[: mark.start()], int(mark[1])
            lines.append(line)
        if joined := "".join(lines):
            self.print(joined, name)
        self._on_mark(name, last_mark)

    def _collect_message(self, line: str) -> str | None:
        """Store a message of ddplaunch; return the text to print for it, or ""; None if the line is no message."""
        try:
            message = convert(json.loads(line), LauncherMessage)
        except (ValueError, ProtocolError):
            return None
        self.messages.append(message)
        if message.kind == "note" and self.on_note(message.text):
            return ""
        return f"ddplaunch: {message.text}\n" if message.kind in ("note", "waiting", "restart") else ""

    def print(self, text: str, name: str) -> None:
        """Print text to ``output``, or to the caller's stdout or stderr."""
        self.context.copy().run(self._print, text, name)

    def _print(self, text: str, name: str) -> None:
        target = getattr(sys, name) if self._output is None else self._output
        if self.error is not None:
            return
        try:
            try:
                target.write(text)
            except UnicodeEncodeError as error:
                target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            target.flush()
        except (OSError, ValueError, AttributeError):  # closed; the job continues
            pass
        except BaseException as error:
            self.error = error
            self.stop()

    def _on_mark(self, name: str, number: float) -> None:
        with self._marks_changed:
            self._last_marks[name] = max(self._last_marks[name], number)
            self._marks_changed.notify_all()
