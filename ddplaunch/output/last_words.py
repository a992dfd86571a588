"""The last words of a rank that failed because of another: in a terminal one line in place of a traceback.

Pure: what a stream prints goes in, what is to be shown comes out. Files and memory keep all of it.
"""

from __future__ import annotations

import re

from ddplaunch.control.failure import first_line, is_secondary_error

EXIT_TIMEOUT_S = 2.0  # seconds that a rank has to end after its traceback; then it was not its last words
_MAX_HELD_BYTES = 1 << 18  # bytes that are held back at most
_TRACEBACK_START = re.compile(rb"(?m)^(\[rank\d+\]: )?Traceback \(most recent call last\):$")
_CONTINUATION = re.compile(rb"\s|$|\[rank\d+\]:|The above exception|During handling|Exception raised from|frame #\d")
"""Lines of a traceback but its exception: torch's own all have its prefix; behind C++'s message come its frames."""

_PREFIX = re.compile(r"(?m)^\[rank\d+\]: ?")  # torch.distributed's own


class TracebackFilter:
    """Holds back what a rank prints from a traceback on, until the stream ends or something shows that it goes on."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, lines: bytes) -> bytes:
        """Take whole lines; return those to show now."""
        if self._held:
            self._held += lines
            return self.release() if len(self._held) > _MAX_HELD_BYTES or self._has_more_output() else b""
        if found := _TRACEBACK_START.search(lines):
            self._held = lines[found.start() :]
            before = lines[: found.start()]
            return before + self.release() if self._has_more_output() else before
        return lines

    def _has_more_output(self) -> bool:
        """Whether something else follows behind the exception."""
        told = False
        for line in self._held.splitlines():
            if line.startswith(b"Traceback"):
                told = False
            elif not _CONTINUATION.match(line):
                if told:
                    return True
                told = True
        return False

    def release(self) -> bytes:
        """Return what was held back: the rank goes on."""
        held, self._held = self._held, b""
        return held

    def close(self) -> bytes:
        """Return what to show of it where the stream has ended."""
        text = _PREFIX.sub("", self._held.decode(errors="replace"))
        *_, frames = text.rpartition("Traceback (most recent call last):\n")
        found = re.search(r"(?m)^\S", frames)
        message = frames[found.start() :] if found else ""
        if not is_secondary_error(message):
            return self.release()
        self._held = b""
        return f"{first_line(message, 60)} (--show all for all of it)\n".encode()
