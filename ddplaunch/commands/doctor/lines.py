"""Lines from a process that may never answer, each waited for until a moment."""

from __future__ import annotations

import os
import select
import time
from typing import Protocol

LONGEST = 4 << 20  # bytes of a line: all ways of some ten thousand nodes fit in


class Readable(Protocol):
    """A pipe or a socket."""

    def fileno(self) -> int: ...


class Lines:
    """The lines that come through a pipe or a socket, each with its newline."""

    def __init__(self, pipe: Readable | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._text = b""

    def next(self, until: float | None, longest: int = LONGEST) -> bytes | None:
        """Read a line; b"" at the end, None if it has not come at ``until``, a moment of time.monotonic().

        A connection that breaks has ended, and so has one with a line of more than ``longest`` bytes: it is not ours.
        """
        fd, poll = self._pipe.fileno(), select.poll()  # select() knows no descriptor above 1023
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._text:
            if not poll.poll(None if until is None else 1000 * max(0.0, until - time.monotonic())):
                return None
            try:
                data = os.read(fd, 1 << 16)
            except (ConnectionError, TimeoutError):  # the latter is TCP's: the other machine is gone
                return b""
            if not data or len(self._text) > longest:
                return b""
            self._text += data
        line, newline, self._text = self._text.partition(b"\n")
        return line + newline
