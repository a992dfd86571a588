"""Lines from a process that may never answer, each waited for until a moment."""

from __future__ import annotations

import os
import select
import time
from typing import IO


class Lines:
    """The lines that come through a pipe, each with its newline."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._text = b""

    def next(self, until: float) -> bytes | None:
        """Read a line; b"" at the end, None if it has not come at ``until``, a moment of time.monotonic()."""
        fd = self._pipe.fileno()
        while b"\n" not in self._text:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return b""
            self._text += data
        line, newline, self._text = self._text.partition(b"\n")
        return line + newline
