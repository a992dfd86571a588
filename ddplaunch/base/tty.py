"""The user's terminal: detects it, reads its size and single keys, restores its settings after a killed program.

Ctrl-C, Ctrl-Z and Ctrl-\\ stay signals.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ddplaunch.base.event_loop import EventLoop

ESCAPE = "\x1b"
ENTER = "\r"
BACKSPACE = "\x7f"
_KEYS = re.compile(r"\x1b[\[O][0-?]*[ -/]*[@-~]|\x1b[^\x1b\[O]|.", re.DOTALL)
"""One match is one key: an escape sequence (arrows, Alt with a letter) or a character."""


def is_interactive(fd: int) -> bool:
    """Whether a descriptor is the user's terminal.

    True for our session's controlling terminal, or if another standard stream is on it too. ``srun -u`` and Open
    MPI's ``mpirun`` create a pty for stdout alone, so that programs are line-buffered, and read it themselves.
    """
    if not os.isatty(fd):
        return False
    try:
        os.tcgetpgrp(fd)
    except OSError:  # ENOTTY: it is the controlling terminal of another session, or of none
        here = os.fstat(fd).st_rdev
        return any(os.isatty(other) and os.fstat(other).st_rdev == here for other in {0, 1, 2} - {fd})
    return True


def can_move_cursor() -> bool:
    """Whether the terminal supports cursor movement, by TERM."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "")


def window_size(fd: int) -> tuple[int, int]:
    """The columns and rows of a terminal; 80 and 24 if unknown."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 80, 24
    return columns or 80, rows or 24


@contextmanager
def keep_terminal_settings() -> Iterator[None]:
    """Context manager: restore, at the end, the settings of the terminal on stdin; does nothing without a terminal."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        yield
    finally:
        with _ignore_sigttou():
            try:
                if termios.tcgetattr(0) != before:
                    termios.tcsetattr(0, termios.TCSADRAIN, before)
            except termios.error:
                pass


class Keyboard:
    """Reads keys while the launcher is in the foreground; otherwise the terminal has its former settings."""

    def __init__(self, loop: EventLoop, on_input: Callable[[bytes], object]) -> None:
        self._loop, self._on_input = loop, on_input
        self._before: list[Any] | None = None  # former settings; None while stopped
        self._own_settings: list[Any] = []
        self._raw = False

    def start(self, *, raw: bool = False) -> None:
        """Start reading, or start again; does nothing without a terminal, or while another program uses it.

        ``raw``: no key sends a signal, not even Ctrl-C.
        """
        if not in_foreground(0):
            return self._unwatch()
        try:
            now = termios.tcgetattr(0)
            if self._before is None or now != self._own_settings or raw != self._raw:
                if self._before is None:
                    self._before = now
                elif raw != self._raw:  # each mode changes only what it needs
                    termios.tcsetattr(0, termios.TCSANOW, self._before)
                self._raw = raw
                (tty.setraw if raw else tty.setcbreak)(0, termios.TCSANOW)
                self._own_settings = termios.tcgetattr(0)
        except termios.error:  # the terminal is gone
            return self._unwatch()
        self._loop.watch_fd(0, self._on_readable)

    def pause(self) -> None:
        """Do not read until the next ``start``; the terminal keeps its settings."""
        self._loop.unwatch_fd(0)

    def stop(self) -> None:
        """Stop reading and restore the terminal's settings."""
        before = self._before
        self._unwatch()
        if before is None:
            return
        with _ignore_sigttou():
            try:
                termios.tcsetattr(0, termios.TCSANOW, before)
            except termios.error:
                pass

    def _unwatch(self) -> None:
        if self._before is not None:
            self._loop.unwatch_fd(0)
        self._before = None

    def _on_readable(self) -> None:
        if not in_foreground(0):  # reading would stop this process (SIGTTIN)
            return self._unwatch()
        try:
            data = os.read(0, 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._loop.unwatch_fd(0)
        self._on_input(data)


class KeyDecoder:
    """Decodes the bytes of a terminal into keys."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

    def decode(self, data: bytes) -> list[str]:
        return [{"\n": ENTER, "\b": BACKSPACE}.get(key, key) for key in _KEYS.findall(self._decoder.decode(data))]


def in_foreground(fd: int) -> bool:
    """Whether a descriptor is a terminal, and this process belongs to its foreground process group."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _ignore_sigttou() -> Iterator[None]:
    """Context manager: ignore SIGTTOU, which stops a background process that changes terminal settings."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
