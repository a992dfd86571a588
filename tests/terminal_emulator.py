"""A user at a terminal: runs a command in a pseudo-terminal and emulates its screen (with pyte)."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.conftest import clean_environment
from tests.scaled_timeouts import scaled_timeout

_ALTERNATE_SCREEN = 1049

FRAME = re.compile(r"(running|stopping) \d\d:\d\d")
"""The first row of a live view."""


class _Screen(pyte.HistoryScreen):
    """A screen with the alternate one of xterm, which pyte lacks: what was shown before it comes back after it."""

    _kept: tuple[dict[int, dict[int, Any]], tuple[int, int]] | None = None  # cells by row and column, and the cursor

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private") and _ALTERNATE_SCREEN in modes:
            cells = {row: dict(cells) for row, cells in self.buffer.items()}
            self._kept = cells, (self.cursor.x, self.cursor.y)
        super().set_mode(*modes, **kwargs)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        if self._kept and kwargs.get("private") and _ALTERNATE_SCREEN in modes:
            cells, (self.cursor.x, self.cursor.y) = self._kept
            self._kept = None
            self.buffer.clear()
            for row, kept in cells.items():
                self.buffer[row].update(kept)
        super().reset_mode(*modes, **kwargs)


class TerminalEmulator:
    """Runs a command until ``end`` or ``close``."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        *,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self._screen = _Screen(columns, rows, history=100_000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self.master, self._slave = pty.openpty()
        self._set_size(columns, rows)
        self.before = termios.tcgetattr(self._slave)
        environment = clean_environment({"TERM": "xterm-256color", **(env or {})})
        if "NO_COLOR" not in (env or {}):
            environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            list(words),
            cwd=cwd,
            env=environment,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            preexec_fn=_make_controlling_terminal,
        )
        self.raw = b""

    @property
    def rows(self) -> list[str]:
        """The rows of the screen, without empty ones at the end."""
        shown = [row.rstrip() for row in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def history(self) -> list[str]:
        """The rows that were scrolled away, and those of the screen."""
        width = self._screen.columns
        above = ["".join(row[column].data for column in range(width)).rstrip() for row in self._screen.history.top]
        return [*above, *self.rows]

    @property
    def colours(self) -> set[str]:
        return {cell.fg for row in self._screen.buffer.values() for cell in row.values()}

    @property
    def settings(self) -> list[Any]:
        """The terminal's settings now; ``before`` has those at the start."""
        return termios.tcgetattr(self._slave)

    @property
    def is_restored(self) -> bool:
        """Whether its settings are as before, and each full screen was left."""
        pairs = ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"))
        return self.settings == self.before and all(self.raw.count(on) == self.raw.count(off) for on, off in pairs)

    @property
    def shows_frame(self) -> bool:
        """Whether the last row is one of a live view's cells, below its others."""
        return len(self.rows) >= 3 and bool(FRAME.match(self.rows[-3]))

    def until(self, seen: str | Callable[[TerminalEmulator], object], timeout: float = 30) -> list[str]:
        """Read until a text is on the screen, or a condition holds; return the screen."""
        enough = (lambda each: any(seen in row for row in each.rows)) if isinstance(seen, str) else seen
        deadline = time.monotonic() + scaled_timeout(timeout)
        while not enough(self):
            if time.monotonic() > deadline or not self._read(deadline):
                pytest.fail(f"waited for {seen!r}, saw:\n" + "\n".join(self.history[-60:]))
        return self.rows

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def end(self, timeout: float = 30) -> int:
        """Read until the command has ended; return its exit code."""
        self.until(lambda each: each.process.poll() is not None, timeout)
        while self._read(time.monotonic() + 0.05):
            pass
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, min(0.05, deadline - time.monotonic())))
        if ready:
            data = os.read(self.master, 1 << 16)
            self.raw += data
            self._stream.feed(data)
        return bool(ready) or time.monotonic() < deadline

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _make_controlling_terminal() -> None:
    """Make the terminal this session's, so that a typed Ctrl-C is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., TerminalEmulator]]:
    """Start commands, each in a terminal of its own, which is closed at the end."""
    begun: list[TerminalEmulator] = []

    def begin(words: Sequence[str], env: Mapping[str, str] | None = None, **size: int) -> TerminalEmulator:
        begun.append(TerminalEmulator(words, tmp_path, env, **size))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
