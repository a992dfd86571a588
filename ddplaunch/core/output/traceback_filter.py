"""Shortens the traceback of a secondary failure: the terminal shows one line for it.

Pure: the lines of a stream go in, the lines to show come out. Log files and memory keep the full traceback.
"""

from __future__ import annotations

import re

from ddplaunch.core.failures import first_line, is_secondary_error

EXIT_TIMEOUT_S = 2.0  # a rank still running this long after a traceback has handled the exception: show the traceback
_MAX_HELD_BYTES = 1 << 18
_TRACEBACK_START = re.compile(rb"(?m)^(\[rank\d+\]: )?Traceback \(most recent call last\):$")
_CONTINUATION = re.compile(rb"\s|$|\[rank\d+\]:|The above exception|During handling|Exception raised from|frame #\d")
"""Lines of a traceback other than the exception: torch's lines have its prefix; C++ frames follow the C++ message."""

_PREFIX = re.compile(r"(?m)^\[rank\d+\]: ?")  # added by torch.distributed


class TracebackFilter:
    """Holds back a rank's output from a traceback on, until the stream ends or more output follows."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, lines: bytes) -> bytes:
        """Add complete lines; return those to show now."""
        if self._held:
            self._held += lines
            return self.release() if len(self._held) > _MAX_HELD_BYTES or self._has_more_output() else b""
        if found := _TRACEBACK_START.search(lines):
            self._held = lines[found.start() :]
            before = lines[: found.start()]
            return before + self.release() if self._has_more_output() else before
        return lines

    def _has_more_output(self) -> bool:
        """Whether other output follows the exception."""
        seen_exception = False
        for line in self._held.splitlines():
            if line.startswith(b"Traceback"):
                seen_exception = False
            elif not _CONTINUATION.match(line):
                if seen_exception:
                    return True
                seen_exception = True
        return False

    def release(self) -> bytes:
        """Return the held lines: the rank continues."""
        held, self._held = self._held, b""
        return held

    def close(self) -> bytes:
        """Return what to show of the held lines at the stream's end: one line for a secondary failure, else all."""
        text = _PREFIX.sub("", self._held.decode(errors="replace"))
        *_, frames = text.rpartition("Traceback (most recent call last):\n")
        found = re.search(r"(?m)^\S", frames)
        message = frames[found.start() :] if found else ""
        if not is_secondary_error(message, frames):
            return self.release()
        self._held = b""
        return f"{first_line(message, 60)} (traceback left out; to see it: --show all)\n".encode()
