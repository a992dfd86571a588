"""Whether a job has stalled: ranks wait for others that do nothing, and nothing was printed for a long time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from ddplaunch.diagnosis.inspection import Frame, Inspection, ProcessCondition, RankInspection
from ddplaunch.diagnosis.sentences import describe_halt, describe_uneven_counts, describe_wait, find_uneven_counts
from ddplaunch.diagnosis.standing import (
    NEW_GROUP,
    STORE_WAIT,
    describe_call,
    distributed_call_of,
    has_ended,
    library_calls,
    thread_in,
    waiting_call_of,
)
from ddplaunch.diagnosis.waits import find_waits
from ddplaunch.words import format_ranks

MIN_BUSY_CPUS = 0.02
"""CPUs: a rank that uses more works. Threads of torch and of loggers, which wake now and then, take less."""

MIN_TRAFFIC_BYTES = 64 << 10
"""Bytes a second: a rank that reads and writes more works, say on a checkpoint."""

MIN_NETWORK_BYTES = 4 << 10
"""Bytes a second: a rank that exchanges more with the world outside the job works, say on an upload."""

_CLOCK_MARGIN = 0.2  # share of the timeout by which the clocks of two nodes may differ
_MAX_NAMED = 3


class Stall(NamedTuple):
    """A job that does not get on."""

    rank: int  # the one that the others wait for; the first of several, or of those that wait where none is missing
    text: str  # who waits for whom
    trace: str  # the stack of that rank, as Python prints one; "" where it is not known
    seconds: float  # how long the first of them have waited
    is_alive: bool  # whether that rank has not ended
    only_looks_idle: (
        bool  # whether it does something that may be work, and only looks idle: it is neither stopped nor waits
    )
    killable: bool  # whether stopping helps: a rank in uninterruptible sleep may only be slow, and cannot be killed
    progress_key: tuple[object, ...]  # equal as long as no rank enters or completes a collective
    location: str  # where that rank is, which the program may come to again


class StallCheck(NamedTuple):
    """A stall; or after how many seconds it would be one, if nothing happens till then."""

    stall: Stall | None = None
    retry_after_s: float | None = None


def check_stall(inspection: Inspection, timeout: float, *, strict: bool, noisy: float = inf) -> StallCheck:
    """Decide whether a job has stalled for ``timeout`` seconds.

    It has if no rank has printed anything for so long, ranks have waited for others for so long, and each rank that is
    waited for is idle, or has ended. A busy one may be at a long validation. ``strict``: so has a job that uses
    collectives and whose ranks are all idle and in none. After ``noisy`` seconds of a wait, output counts for nothing.
    """
    found = inspection.ranks
    if inspection.silent or len(found) < inspection.world_size or any(rank.moved for rank in found):
        return StallCheck()
    by_number = inspection.by_number
    waiting = find_waits(inspection)
    inside = {rank for wait in waiting for rank in (*wait.waiting, *dict(wait.ahead))}
    if waiting:
        awaited = {rank for wait in waiting for rank in wait.roots}
        if any(wait.has_unreachable_members for wait in waiting):
            awaited |= by_number.keys() - inside
    elif strict and any(rank.groups or rank.answers is not None for rank in found):
        awaited = {rank.rank for rank in found if not has_ended(rank)}
    else:
        awaited = set()
    # Ranks that may set a key of the store; and, with an old torch, ranks that may be in another collective each time.
    others = {each for wait in waiting if wait.operation == STORE_WAIT for each in by_number.keys() - {*wait.waiting}}
    others |= {rank for rank in inside if by_number[rank].answers is None and not by_number[rank].groups}
    if not (inside or awaited) or any(is_working(by_number[rank]) for rank in awaited | others):
        return StallCheck()
    standing = [seconds for rank in inside or awaited if (seconds := by_number[rank].standstill) is not None]
    # Where no rank is missing the last to come counts, else the first that waits.
    lasted = (max if inside and awaited else min)(standing, default=0.0)
    silence = min((rank.quiet for rank in found if rank.quiet is not None), default=timeout)
    if waiting and lasted >= noisy:
        silence = lasted
    elif silence < timeout * (1 - _CLOCK_MARGIN):  # the clock of that node has not run out yet
        return StallCheck(retry_after_s=noisy - lasted) if waiting and lasted >= noisy / 2 else StallCheck()
    if (short := timeout - min(lasted, silence)) > 0:
        return StallCheck(retry_after_s=short)
    # Where ranks have entered different collectives, the fewest are the odd ones.
    entered, odd = waiting[0].mismatched[-1] if waiting and waiting[0].mismatched else (None, ())
    if waiting and waiting[0].operation == NEW_GROUP and waiting[0].missing:
        odd = (waiting[0].missing[0].rank,)
    first = by_number[odd[0] if odd else min(awaited or inside)]
    if waiting:
        told = describe_wait(waiting[0], inspection)
    elif few := find_uneven_counts(found):
        first = next(iter(few.values()))[0]
        told = f"no rank does anything, and {describe_uneven_counts(found)}"
    else:
        told = f"no rank does anything: {describe_activity(inspection)}"
    killable = not any(by_number[rank].condition is ProcessCondition.BLOCKED for rank in awaited)
    mark = tuple((rank.rank, rank.groups) for rank in found)
    idle = bool(awaited) and first.condition is ProcessCondition.ALIVE and waiting_call_of(first) is None
    place = describe_locations([first])
    at = format_trace(first, entered.operation if entered else "")
    return StallCheck(Stall(first.rank, told, at, lasted, not has_ended(first), idle, killable, mark, place))


def is_working(rank: RankInspection) -> bool:
    """Whether a rank gets on by itself, or may: one that too little is known about counts as working."""
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
    """The user's frames of a rank as Python prints them, the innermost last: of the thread that runs a collective."""
    thread = thread_in(rank, operation)
    frames = thread.frames if thread else ()
    return "\n".join(f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(frames) if f.own)


def describe_activity(inspection: Inspection) -> str:
    """Say what the ranks that have not ended do: who waits for whom, or else at which lines they are."""
    if waiting := find_waits(inspection):
        return describe_wait(waiting[0], inspection)
    left = [rank for rank in inspection.ranks if not has_ended(rank)]
    told = describe_locations(left)
    return (
        f"{format_ranks(rank.rank for rank in left)}: {told}" if told and len(_ranks_by_location(left)) == 1 else told
    )


def find_stragglers(inspection: Inspection, among: Collection[int]) -> list[RankInspection]:
    """The ranks of these that have not ended."""
    return [rank for rank in inspection.ranks if rank.rank in among and not has_ended(rank)]


def describe_locations(found: Sequence[RankInspection]) -> str:
    """Say where ranks are: "save at train.py:31", for several "rank 0: …; ranks 1 and 2: …"; "" if unknown."""
    places = _ranks_by_location(found)
    if len(places) < 2:
        return next(iter(places), "")
    told = [f"{format_ranks(numbers)}: {place}" for place, numbers in places.items() if place]
    more = [f"and {len(told) - _MAX_NAMED} other places"] if len(told) > _MAX_NAMED else []
    return "; ".join([*told[:_MAX_NAMED], *more])


def _ranks_by_location(found: Sequence[RankInspection]) -> dict[str, list[int]]:
    """Where ranks are, and which of them."""
    places: dict[str, list[int]] = {}
    apart = library_calls(found, found)
    for rank in found:
        places.setdefault(_location_of(rank, apart.get(rank.rank)), []).append(rank.rank)
    return places


def _location_of(rank: RankInspection, apart: Frame | None) -> str:
    """Where a rank is that waits for no other, or alone: "destroy_process_group at train.py:90"."""
    call = distributed_call_of(rank)
    if call and call.place:
        return f"{call.function} at {call.place.file}:{call.place.line}"
    return describe_halt(rank).state if rank.condition is ProcessCondition.STOPPED else describe_call(rank, apart)
