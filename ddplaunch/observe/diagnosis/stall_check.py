"""Decides whether a job has stalled: ranks wait for ranks that are idle, and nothing was printed for a long time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_ranks
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    NEW_GROUP,
    STORE_WAIT,
    collective_thread,
    describe_rank_activity,
    differing_library_calls,
    distributed_call_of,
    has_ended,
    is_deadlocked_in_gloo,
    runs_program,
    waiting_call_of,
)
from ddplaunch.observe.diagnosis.wait_sentences import (
    describe_halt,
    describe_uneven_counts,
    describe_wait,
    find_uneven_counts,
)
from ddplaunch.observe.diagnosis.waits import Wait, find_waits

MIN_BUSY_CPUS = 0.015
"""CPUs: a rank is busy if it uses more, or would use more if it had not to wait for a CPU (``withheld_cpu_s``).

Threads of torch and of loggers, which wake up at times, use less, and so does a loop that looks for a file every 5 ms
(0.6 % of a CPU). An evaluation of small batches between sleeps of 20 ms used 1.8 %.
"""

MIN_TRAFFIC_BYTES = 64 << 10
"""Bytes a second: a rank that reads and writes more is busy, for example with a checkpoint."""

MIN_NETWORK_BYTES = 4 << 10
"""Bytes a second: a rank that exchanges more with hosts outside the job is busy, for example with an upload."""

_CLOCK_MARGIN = 0.2  # share of the timeout by which the stall detectors of two nodes may differ
_MAX_NAMED = 3


class Stall(NamedTuple):
    """A stalled job; "the rank" is the first that others wait for, or the first that waits if none is missing."""

    rank: int
    text: str  # who waits for whom
    trace: str  # the rank's stack, in Python's format; "" if unknown
    seconds: float  # how long ranks have waited
    is_alive: bool  # the rank has not ended
    only_looks_idle: bool  # the rank may be busy though it looks idle: it is not stopped, and waits for no other rank
    killable: bool  # stopping may help: a rank in uninterruptible sleep may only be slow, and cannot be killed
    progress_key: tuple[object, ...]  # equal as long as no rank enters or completes a collective
    location: str  # where the rank is; the program may come there again


class StallCheckResult(NamedTuple):
    """The result of a check: a stall, the seconds until there is one if nothing changes, or neither."""

    stall: Stall | None = None
    retry_after_s: float | None = None


def check_stall(inspection: Inspection, timeout: float, *, strict: bool, noisy: float = inf) -> StallCheckResult:
    """Decide whether a job has stalled for ``timeout`` seconds.

    It has stalled if for that long no rank has printed anything or ended and ranks have waited for others, and each of
    the awaited ranks is idle or has ended. A busy rank may be in a long validation.

    Args:
        inspection: all ranks, with their waits.
        timeout: in seconds.
        strict: a job that uses collectives has stalled also if all its ranks are idle and none is in a collective.
        noisy: seconds of waiting after which output does not count.
    """
    ranks = inspection.ranks
    if inspection.silent or len(ranks) < inspection.world_size or any(rank.moved for rank in ranks):
        return StallCheckResult()
    by_number = inspection.by_number
    waiting = find_waits(inspection)
    inside = {rank for wait in waiting for rank in (*wait.waiting, *dict(wait.ahead))}
    if waiting:
        awaited = {rank for wait in waiting for rank in wait.root_causes}
        if any(wait.has_unreachable_members for wait in waiting):
            awaited |= by_number.keys() - inside
    elif deadlocked := {rank.rank for rank in ranks if is_deadlocked_in_gloo(rank)}:
        awaited = deadlocked
    elif strict and any(rank.groups or rank.answers is not None for rank in ranks):
        awaited = {rank.rank for rank in ranks if runs_program(rank)}
    else:
        awaited = set()
    # Ranks that may set the store's key; and, with an old torch, ranks that may be in a new collective each time.
    others = {each for wait in waiting if wait.operation == STORE_WAIT for each in by_number.keys() - {*wait.waiting}}
    others |= {rank for rank in inside if by_number[rank].answers is None and not by_number[rank].groups}
    if not (inside or awaited) or any(may_be_busy(by_number[rank]) for rank in awaited | others):
        return StallCheckResult()
    standing = [seconds for rank in inside or awaited if (seconds := by_number[rank].standstill) is not None]
    # If no rank is missing, the last that began to wait counts, else the first.
    lasted = (max if inside and awaited else min)(standing, default=0.0)
    silence = min((rank.quiet for rank in ranks if rank.quiet is not None), default=timeout)
    if waiting and lasted >= noisy:
        silence = lasted
    elif silence < timeout * (1 - _CLOCK_MARGIN):  # the stall detector of that node has not expired yet
        return StallCheckResult(retry_after_s=noisy - lasted) if waiting and lasted >= noisy / 2 else StallCheckResult()
    if (short := timeout - min(lasted, silence)) > 0:
        return StallCheckResult(retry_after_s=short)
    return StallCheckResult(_describe_stall(inspection, waiting, inside, awaited, lasted))


def _describe_stall(
    inspection: Inspection, waiting: Sequence[Wait], inside: Collection[int], awaited: Collection[int], lasted: float
) -> Stall:
    """Describe a stall: the ranks ``inside`` have waited ``lasted`` seconds for the ranks ``awaited``."""
    ranks, by_number = inspection.ranks, inspection.by_number
    # If ranks have entered different collectives, the smallest group is at fault.
    entered, odd = waiting[0].mismatched[-1] if waiting and waiting[0].mismatched else (None, ())
    if waiting and waiting[0].operation == NEW_GROUP and waiting[0].missing:
        odd = (waiting[0].missing[0].rank,)
    roots = waiting[0].root_causes if waiting else ()  # of other waits too, but the text is on the first
    first = by_number[odd[0] if odd else min(roots or awaited or inside)]
    if waiting:
        text = describe_wait(waiting[0], inspection)
    elif is_deadlocked_in_gloo(first):
        text = _describe_rank_locations([by_number[each] for each in sorted(awaited)])
    elif few := find_uneven_counts(ranks):
        first = next(iter(few.values()))[0]
        text = f"all ranks are idle, and {describe_uneven_counts(ranks)}"
    else:
        text = f"all ranks are idle: {describe_activity(inspection)}"
    killable = not any(by_number[rank].condition is ProcessCondition.BLOCKED for rank in awaited)
    progress_key = tuple((rank.rank, rank.groups) for rank in ranks)
    knows_why = waiting_call_of(first) is not None or is_deadlocked_in_gloo(first)
    idle = bool(awaited) and first.condition is ProcessCondition.ALIVE and not knows_why
    return Stall(
        first.rank,
        text,
        format_trace(first, entered.operation if entered else ""),
        lasted,
        is_alive=not has_ended(first),
        only_looks_idle=idle,
        killable=killable,
        progress_key=progress_key,
        location=describe_locations([first]),
    )


def may_be_busy(rank: RankInspection) -> bool:
    """Whether a rank is busy, or may be: a rank about which too little is known counts as busy."""
    if rank.condition is ProcessCondition.STOPPED or has_ended(rank):
        return False
    if rank.condition is ProcessCondition.PENDING or rank.busy is None:
        return True
    return (
        rank.busy >= MIN_BUSY_CPUS
        or (rank.traffic or 0.0) >= MIN_TRAFFIC_BYTES
        or (rank.network or 0.0) >= MIN_NETWORK_BYTES
    )


def format_trace(rank: RankInspection, operation: str = "") -> str:
    """Format the user's frames of the thread that runs a collective, like Python's traceback: the innermost last."""
    thread = collective_thread(rank, operation)
    frames = thread.frames if thread else ()
    return "\n".join(f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(frames) if f.own)


def describe_activity(inspection: Inspection) -> str:
    """Describe what the ranks that have not ended do: who waits for whom, or else where in the code they are."""
    if waiting := find_waits(inspection):
        return describe_wait(waiting[0], inspection)
    return _describe_rank_locations([rank for rank in inspection.ranks if runs_program(rank)])


def _describe_rank_locations(found: Sequence[RankInspection]) -> str:
    locations = describe_locations(found)
    if locations and len(_ranks_by_location(found)) == 1:
        return f"{format_ranks(rank.rank for rank in found)}: {locations}"
    return locations


def find_stragglers(inspection: Inspection, among: Collection[int]) -> list[RankInspection]:
    """Return the ranks in ``among`` that still run the user's program."""
    return [rank for rank in inspection.ranks if rank.rank in among and runs_program(rank)]


def describe_locations(found: Sequence[RankInspection]) -> str:
    """Describe where ranks are: "save at train.py:31", for several "rank 0: …; ranks 1 and 2: …"; "" if unknown."""
    by_location = _ranks_by_location(found)
    if len(by_location) < 2:
        return next(iter(by_location), "")
    parts = [f"{format_ranks(numbers)}: {location}" for location, numbers in by_location.items() if location]
    more = [f"and {len(parts) - _MAX_NAMED} other places"] if len(parts) > _MAX_NAMED else []
    return "; ".join([*parts[:_MAX_NAMED], *more])


def _ranks_by_location(ranks: Sequence[RankInspection]) -> dict[str, list[int]]:
    """Map each location in the code to the ranks that are there."""
    by_location: dict[str, list[int]] = {}
    apart = differing_library_calls(ranks, ranks)
    for rank in ranks:
        by_location.setdefault(_location_of(rank, apart.get(rank.rank)), []).append(rank.rank)
    return by_location


def _location_of(rank: RankInspection, apart: Frame | None) -> str:
    """Return the location of a rank: "destroy_process_group at train.py:90", "load at data.py:31"."""
    call = distributed_call_of(rank)
    if call and call.place:
        return f"{call.function} at {call.place.file}:{call.place.line}"
    return (
        describe_halt(rank).state if rank.condition is ProcessCondition.STOPPED else describe_rank_activity(rank, apart)
    )
