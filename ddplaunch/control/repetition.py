"""In which way an attempt failed, and whether the next failed in the same way: then a third would, too."""

from __future__ import annotations

import os
import re

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.attempt import JobAttempt
from ddplaunch.control.transience import is_transient
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Frame

LONGER = 1.2  # times as long, and
LATER = 1.0  # seconds more: an attempt that lasted longer than both together has got further
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, sizes, process ids, ports


@dataclass(frozen=True)
class Way:
    """How an attempt failed, as far as the next is compared with it."""

    attempt: int
    world_size: int
    rank: int
    error: str  # type and message, without numbers
    frames: tuple[Frame, ...]  # of the exception, the innermost first
    uptime: float  # seconds
    collectives: int | None  # that the rank had entered; None where it is not known, or none

    @property
    def place(self) -> str:
        """The innermost line of the user's own code: "train.py:41"."""
        frame = next((each for each in self.frames if each.own), self.frames[0])
        return f"{frame.file}:{frame.line}"

    def repeats(self, before: Way | None) -> bool:
        """Whether it is the same failure as in the attempt before, and nothing more was done until it came."""
        if before is None or self._sameness != before._sameness or self.attempt != before.attempt + 1:
            return False
        if self.collectives is not None and before.collectives is not None:
            return self.collectives <= before.collectives
        return self.uptime <= before.uptime * LONGER + LATER

    @property
    def _sameness(self) -> tuple[object, ...]:
        return self.world_size, self.rank, self.error, self.frames


def way_of(attempt: JobAttempt, uptime: float) -> Way | None:
    """How an attempt failed that lived for ``uptime`` seconds.

    None where its end says nothing about the next: it was no exception of Python's with a traceback, it may pass by
    itself, or it only tells of a peer, or of a time limit.
    """
    verdict = attempt.verdict
    if verdict is None or attempt.cut is not None:
        return None
    first = verdict.first
    if not (first.message and first.traceback) or first.is_consequence or first.timed_out or is_transient(first):
        return None
    from ddplaunch.diagnosis.stack_dump import parse_traceback

    frames = parse_traceback(first.traceback, os.getcwd())
    error = _VARIES.sub("0", first.message)
    if not frames:
        return None
    return Way(attempt.number, attempt.world_size, first.rank, error, frames, uptime, first.collectives)
