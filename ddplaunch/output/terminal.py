"""The terminal: whether a person is there, its settings, which a program killed at a prompt leaves changed, and single
keys from it. Ctrl-C, Ctrl-Z and Ctrl-\\ stay signals.
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

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from ddplaunch.loop import EventLoop

ESCAPE = "\x1b"
ENTER = "\r"
BACKSPACE = "\x7f"
_KEYS = re.compile(r"\x1b[\[O][0-?]*[ -/]*[@-~]|\x1b[^\x1b\[O]|.", re.DOTALL)
"""An arrow is one key, and so is Alt with a letter."""


def is_interactive(fd: int) -> bool:
    """Whether a descriptor is a terminal that a person looks at.

    It is if our session is led from it, or if another of our standard streams is on it too. ``srun -u`` and Open MPI's
    ``mpirun`` make one for stdout alone, so that programs print by lines, and read it themselves.
    """
    if not os.isatty(fd):
        return False
    try:
        os.tcgetpgrp(fd)
    except OSError:  # ENOTTY: another session has it, or none
        here = os.fstat(fd).st_rdev
        return any(os.isatty(other) and os.fstat(other).st_rdev == here for other in {0, 1, 2} - {fd})
    return True


def can_move_cursor() -> bool:
    """Whether the terminal moves its cursor on demand."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "")


def window_size(fd: int) -> tuple[int, int]:
    """The columns and rows of a terminal; 80 and 24 where it does not say."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 80, 24
    return columns or 80, rows or 24


@contextmanager
def restore_terminal() -> Iterator[None]:
    """Give the terminal on standard input back as it was; does nothing where there is none."""
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
    """Hears keys while we are in the foreground; the terminal is as it was before ``start`` whenever we are not."""

    def __init__(self, loop: EventLoop, on_key: Callable[[str], object]) -> None:
        self._loop, self._heard = loop, on_key
        self._before: list[Any] | None = None  # its settings; None while it is not ours
        self._ours: list[Any] = []
        self._raw: Callable[[bytes], object] | None = None  # who gets all that is typed, Ctrl-C too
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

    def start(self, on_raw_input: Callable[[bytes], object] | None = None) -> None:
        """Take the terminal, or take it back; does nothing where there is none, or another program has it.

        ``on_raw_input`` gets all that is typed as it is, and no key is a signal then.
        """
        if not in_foreground(0):
            return self._unwatch()
        try:
            now = termios.tcgetattr(0)
            if self._before is not None and now == self._ours and on_raw_input == self._raw:
                return
            if self._before is None:
                self._before = now
            self._raw = on_raw_input
            if on_raw_input is None:
                tty.setcbreak(0, termios.TCSANOW)
            else:
                tty.setraw(0, termios.TCSANOW)
            self._ours = termios.tcgetattr(0)
        except termios.error:  # it has gone
            return self._unwatch()
        self._loop.watch_fd(0, self._on_readable)

    def stop(self) -> None:
        """Give it back as it was."""
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
        if not in_foreground(0):  # to read would stop us (SIGTTIN)
            return self._unwatch()
        try:
            data = os.read(0, 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._loop.unwatch_fd(0)
        if self._raw is not None:
            self._raw(data)
            return
        for key in _KEYS.findall(self._decoder.decode(data)):
            self._heard({"\n": ENTER, "\b": BACKSPACE}.get(key, key))


def in_foreground(fd: int) -> bool:
    """Whether a descriptor is a terminal, and we are the program that it is in front of."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _ignore_sigttou() -> Iterator[None]:
    """A job in the background would be stopped for changing a terminal (SIGTTOU)."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
