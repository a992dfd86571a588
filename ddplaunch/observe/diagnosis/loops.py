"""Finds ranks that are busy at one place of the program, inspection after inspection, while others wait for them.

Evidence for "has been at train.py:88 for 10 min": since then no rank entered or completed a collective, and each of at
least ``MIN_SIGHTINGS`` inspections saw the rank there. It may still be a long evaluation, so it is only reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_duration, format_ranks
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import describe_noncollective_wait, format_line
from ddplaunch.observe.diagnosis.stall_check import MIN_NETWORK_BYTES, MIN_TRAFFIC_BYTES, may_be_busy
from ddplaunch.observe.diagnosis.wait_sentences import SILENT_TEXT
from ddplaunch.observe.diagnosis.waits import Wait, find_waits, wait_title

MIN_SIGHTINGS = 4
_MAX_LINES = 10  # between the first and the last line of a loop


class BusyRank(Struct, frozen=True):
    """A rank that computes while other ranks wait for it."""

    rank: RankInspection
    wait: Wait
    progress_key: tuple[object, ...]  # equal as long as no rank enters or completes a collective

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames of user code in the main thread, else in the first thread that has any; outermost first."""
        stacks = (tuple(frame for frame in thread.frames[::-1] if frame.own) for thread in self.rank.threads)
        return next(filter(None, stacks), ())


def find_busy_ranks(inspection: Inspection) -> list[BusyRank]:
    """Return the ranks that compute while others wait for them; a rank that reads or writes much is left out."""
    ranks = inspection.ranks
    if any(rank.moved for rank in ranks):
        return []
    key = tuple((rank.rank, rank.groups) for rank in ranks if rank.answers is not False)
    waits: dict[int, Wait] = {}
    for wait in find_waits(inspection):
        for rank in wait.root_causes:
            waits.setdefault(rank, wait)
    busy = ((rank, waits[rank.rank]) for rank in ranks if rank.rank in waits and _is_computing(rank))
    return [BusyRank(rank, wait, key) for rank, wait in busy]


def _is_computing(rank: RankInspection) -> bool:
    is_known = rank.condition is ProcessCondition.ALIVE and rank.busy is not None
    moves_data = (rank.traffic or 0.0) >= MIN_TRAFFIC_BYTES or (rank.network or 0.0) >= MIN_NETWORK_BYTES
    return is_known and may_be_busy(rank) and not moves_data


def find_loop(stacks: Sequence[tuple[Frame, ...]]) -> str:
    """Return the place at which the rank was in all ``stacks``: "train.py:88", "train.py:88-90"; "" if there is none.

    A loop may have a few lines, and call functions; but in half of the stacks the innermost frame is in these lines.
    ``stacks``: the user's frames, the outermost first.
    """
    place = ""
    depth = 0
    for depth, frames in enumerate(zip(*stacks, strict=False), 1):
        lines = {frame.line for frame in frames}
        if len({(frame.file, frame.function) for frame in frames}) > 1 or max(lines) - min(lines) >= _MAX_LINES:
            depth -= 1
            break
        place = format_line(frames[0]) if len(lines) == 1 else f"{frames[0].file}:{min(lines)}-{max(lines)}"
        if len(lines) > 1:
            break
    return place if 2 * sum(len(stack) == depth for stack in stacks) >= len(stacks) else ""


def describe_loop(busy: BusyRank, place: str, seconds: float) -> str:
    """Describe that a rank has been at a place for this long: "rank 1 has been at train.py:88 for 10 min, …"."""
    rank, wait = busy.rank, busy.wait
    text = f"rank {rank.rank} has been at {place} for {format_duration(seconds)}"
    why = SILENT_TEXT if rank.answers is False else describe_noncollective_wait(rank)
    verb = "waits" if len(wait.waiting) == 1 else "wait"
    inside = f" ({why})" if why else ""
    return f"{text}{inside}, while {format_ranks(wait.waiting)} {verb} for it in {wait_title(wait)}"
