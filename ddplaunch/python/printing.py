"""What ranks print, on its way to the streams of the program that launched them."""

from __future__ import annotations

import contextvars
import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from ddplaunch.output.voice import JSON_LINE_START

_CHUNK = 1 << 16


class OutputPrinter:
    """Prints what comes from a launcher, each stream in a thread; what ddplaunch itself says is kept."""

    def __init__(self, output: IO[str] | None, mark: str) -> None:
        """``output``: for both streams; by default ours. ``mark``: how lines begin that ``wait_for_mark`` waits for."""
        self._output, self._mark = output, re.compile(re.escape(mark) + r"(\d+)\n")
        self._news = threading.Condition()
        self._seen: dict[str, float] = {"stdout": 0, "stderr": 0}
        self.context = contextvars.copy_context()
        """Of who waits for it: in a notebook this tells to which cell a line belongs."""
        self.on_note: Callable[[str], bool] = lambda text: False
        """Is told each note of ddplaunch, in the thread that reads it; whether it need not be printed."""
        self.stop: Callable[[], None] = lambda: None
        """Is called once the stream has raised something."""
        self.error: BaseException | None = None
        """What the stream has raised, which is the caller's; nothing more is written to it."""
        self.messages: list[dict[str, Any]] = []
        """The records of ddplaunch itself (--log-json)."""

    def print_stream(self, pipe: IO[bytes], name: str) -> None:
        """Print what comes on stdout or stderr, to its end."""
        rest = b""
        while data := os.read(pipe.fileno(), _CHUNK):
            lines, end, rest = (rest + data).rpartition(b"\n")
            self._take((lines + end).decode(errors="replace"), name)
        self._take(rest.decode(errors="replace"), name)
        self._on_mark(name, math.inf)

    def wait_for_mark(self, number: int, seconds: float) -> bool:
        """Wait until the mark with this number has come on both streams, or they have ended."""
        with self._news:
            return self._news.wait_for(lambda: min(self._seen.values()) >= number, seconds)

    def _take(self, text: str, name: str) -> None:
        """Print what ranks have printed, and notes of ddplaunch as lines."""
        printed: list[str] = []
        reached = 0
        for line in io.StringIO(text, newline="\n"):  # a rank may print what else ends lines
            if name == "stderr" and line.startswith(JSON_LINE_START):
                line = self._collect_message(line)
            elif mark := self._mark.search(line):
                line, reached = line[: mark.start()], int(mark[1])
            printed.append(line)
        if whole := "".join(printed):
            self.print(whole, name)
        self._on_mark(name, reached)

    def _collect_message(self, line: str) -> str:
        """Keep what ddplaunch says; return what people should read of it now."""
        try:
            said = json.loads(line)
        except ValueError:  # cut
            return ""
        self.messages.append(said)
        if said["kind"] == "note" and self.on_note(said["text"]):
            return ""
        return f"ddplaunch: {said['text']}\n" if said["kind"] in ("note", "waiting", "restart") else ""

    def print(self, text: str, name: str) -> None:
        """Print a text on ``output``, or on stdout or stderr of the caller."""
        self.context.copy().run(self._print, text, name)

    def _print(self, text: str, name: str) -> None:
        target = self._output or getattr(sys, name)
        if self.error is not None:
            return
        try:
            try:
                target.write(text)
            except UnicodeEncodeError as error:
                target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            target.flush()
        except (OSError, ValueError, AttributeError):  # closed; the job goes on
            pass
        except BaseException as error:
            self.error = error
            self.stop()

    def _on_mark(self, name: str, number: float) -> None:
        with self._news:
            self._seen[name] = max(self._seen[name], number)
            self._news.notify_all()
