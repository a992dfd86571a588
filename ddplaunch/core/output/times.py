"""Timestamps of a rank's output for `logs --since`: pairs of offset and time, at most one per second."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.base.safe_files import open_for_writing

INTERVAL_S = 1.0  # between two marks


class Mark(Struct, frozen=True):
    """A timestamp: the output from ``offset`` on came at this time or later."""

    offset: int  # bytes
    at: float  # seconds since the epoch


class OutputTimes:
    """The marks of one rank's output in all attempts; offsets count from its first byte."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()  # of the output in memory
        self._file = -1
        self._start = 0  # offset of the attempt's first byte
        self._last = -math.inf  # time of the attempt's last mark

    def begin(self, start: int, log: str | None) -> None:
        """Begin an attempt at the offset ``start``; write its marks to a file next to its log file, if it has one.

        Raises OSError if the file cannot be created.
        """
        self.close()
        self._start, self._last = start, -math.inf
        if log:
            self._file = open_for_writing(times_file(log), os.O_APPEND)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def is_mark_due(self, now: float) -> bool:
        return not 0 <= now - self._last < INTERVAL_S  # the clock may be set back

    def add(self, mark: Mark, oldest: int) -> None:
        """Add a mark, and drop those of output before the offset ``oldest``. Raises OSError on a write error."""
        mark = Mark(max(mark.offset, self._start), mark.at)
        self._marks.append(mark)
        self._last = mark.at
        while len(self._marks) > 1 and self._marks[1].offset <= oldest:
            self._marks.popleft()
        if self._file >= 0:
            os.write(self._file, format_marks([mark], self._start))

    def since(self, moment: float) -> int | None:
        """Return the offset at which the output since this time begins; None if there is no such output."""
        return offset_since(self._marks, moment)

    def format_after(self, start: int) -> bytes:
        """Format the marks of the output from an offset on, with offsets relative to it."""
        marks = [*self._marks]
        return format_marks(marks[sum(each.offset <= start for each in marks[1:]) :], start)


def offset_since(marks: Iterable[Mark], moment: float) -> int | None:
    """Return the offset where the output since a time begins, up to a second early; None if there is none."""
    return next((each.offset for each in marks if each.at > moment - INTERVAL_S), None)


def times_file(log: str) -> str:
    """The path of the file with the marks of a log file."""
    return f"{log.removesuffix('.log')}.times"


def format_marks(marks: Sequence[Mark], start: int) -> bytes:
    """Format marks, one per line, with offsets relative to ``start``, where the file begins."""
    return b"".join(b"%d %.3f\n" % (max(0, each.offset - start), each.at) for each in marks)


def parse_marks(text: bytes) -> list[Mark]:
    """Parse marks; malformed lines, such as one cut off on a full disk, are skipped."""
    marks = []
    for line in text.splitlines():
        offset, _, at = line.partition(b" ")
        with suppress(ValueError):
            marks.append(Mark(int(offset), float(at)))
    return marks
