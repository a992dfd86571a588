"""The pseudo-terminal of a rank whose debugger draws on a terminal (pudb, for example)."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop

_SCROLLBACK_BYTES = 1 << 16  # of output that a user who attaches later sees


class RankTerminal:
    """The pseudo-terminal of a rank; after ``close`` the programs that use it get end of file."""

    def __init__(self, loop: EventLoop, on_output: Callable[[bytes], None]) -> None:
        """Open the terminal; ``on_output`` gets what is written there. Raises OSError if no pseudo-terminal is free."""
        self._loop, self._on_output = loop, on_output
        self._main_fd, self._rank_fd = os.openpty()  # kept open here too: the rank opens it repeatedly
        self.path = os.ttyname(self._rank_fd)
        self.set_size(80, 24)
        self.scrollback = b""
        self._input = bytearray()  # input that was not written yet
        os.set_blocking(self._main_fd, False)
        loop.watch_fd(self._main_fd, self.read_output)

    def write_input(self, data: bytes) -> None:
        if len(self._input) < _SCROLLBACK_BYTES:  # more is not typed by hand
            self._input += data
        self._on_writable()

    def set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0)
        fcntl.ioctl(self._main_fd, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        if self._main_fd >= 0:
            self._loop.unwatch_fd(self._main_fd)
            os.close(self._main_fd)
            os.close(self._rank_fd)
        self._main_fd = -1

    def read_output(self) -> None:
        """Called when the pseudo-terminal has output: read it and pass it to ``on_output``."""
        try:
            data = os.read(self._main_fd, 1 << 16)
        except OSError:
            return
        self.scrollback = (self.scrollback + data)[-_SCROLLBACK_BYTES:]
        self._on_output(data)

    def _on_writable(self) -> None:
        try:
            while self._input:
                del self._input[: os.write(self._main_fd, self._input)]
        except BlockingIOError:
            return self._loop.watch_fd(self._main_fd, self._on_writable, write=True)
        except OSError:
            self._input.clear()
        self._loop.unwatch_fd(self._main_fd, write=True)
