"""The terminal of a rank whose debugger needs one: a pseudo-terminal of the launcher's."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable

from ddplaunch.loop import EventLoop

_SCROLLBACK_BYTES = 1 << 16  # bytes of what was drawn that somebody who comes later sees


class RankTerminal:
    """One terminal, until it is closed: who still uses it finds its end then."""

    def __init__(self, loop: EventLoop, on_output: Callable[[bytes], None]) -> None:
        """``on_output`` gets what is written there. Raises OSError where the system has none."""
        self._loop, self._drawn = loop, on_output
        self._ours, self._theirs = os.openpty()  # theirs stays open here too: the rank comes and goes
        self.path = os.ttyname(self._theirs)
        self.set_size(80, 24)
        self.scrollback = b""
        self._typed = bytearray()  # that it has not taken yet
        os.set_blocking(self._ours, False)
        loop.watch_fd(self._ours, self.read_output)

    def write_input(self, data: bytes) -> None:
        if len(self._typed) < _SCROLLBACK_BYTES:  # who types on all the same is no person
            self._typed += data
        self._on_writable()

    def set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        if self._ours >= 0:
            self._loop.unwatch_fd(self._ours)
            os.close(self._ours)
            os.close(self._theirs)
        self._ours = -1

    def read_output(self) -> None:
        """Take in what has been drawn by now."""
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:
            return
        self.scrollback = (self.scrollback + data)[-_SCROLLBACK_BYTES:]
        self._drawn(data)

    def _on_writable(self) -> None:
        try:
            while self._typed:
                del self._typed[: os.write(self._ours, self._typed)]
        except BlockingIOError:
            return self._loop.watch_fd(self._ours, self._on_writable, write=True)
        except OSError:
            self._typed.clear()
        self._loop.unwatch_fd(self._ours, write=True)
