"""Which rank a failed job had waited for: what the failure report says first where all others only waited."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.chains import format_cycle
from ddplaunch.diagnosis.inspection import Frame, Inspection, ProcessCondition, RankInspection
from ddplaunch.diagnosis.sentences import describe_halt, describe_mismatch
from ddplaunch.diagnosis.stack_dump import parse_traceback
from ddplaunch.diagnosis.standing import (
    FILE_LOCK,
    INIT_FUNCTION,
    POINT_TO_POINT_FUNCTIONS,
    STORE_WAIT,
    collective_entry_line,
    describe_call,
    distributed_call_in,
    distributed_call_of,
    format_line,
    format_location,
    group_progress,
    has_ended,
    library_calls,
    user_frame,
    user_line_of,
    waiting_call_of,
)
from ddplaunch.diagnosis.waits import Wait, find_waits, short_wait_title, wait_title
from ddplaunch.words import format_ranks

_TIMEOUT = re.compile(r"(?:Timed out waiting |wait timeout after |Timeout\(ms\)=)(\d{1,12})")  # milliseconds
_STORE_LOST = "DistNetworkError"
"""What a rank raises whose connection to the job's store has closed; torch has no other such connections."""

_SEEN_LATE = 1.0  # seconds from the moment when a rank closes its connections until its end is seen
_MAX_NAMED = 3


@dataclass(frozen=True)
class Culprit:
    """The ranks that a job had waited for, or that did not do what the others did."""

    ranks: tuple[int, ...]
    collective: str  # what they did not enter: "all_reduce #4121", "init_process_group"; "" where it is not known
    waiters: int  # how many ranks waited for them
    frame: Frame | None  # the user's line at which the first of them was
    text: str  # a sentence


@dataclass(frozen=True)
class _TimedOutRank:
    """A rank whose own failure only says that it had waited."""

    rank: int
    function: str  # of torch.distributed, in which it failed; "" where its traceback does not tell
    place: Frame | None
    directly: bool  # whether the user's own line called what failed: the wait() of a send, or of a collective


def find_culprit(
    inspection: Inspection,
    failed: Sequence[tuple[int, str]] = (),
    *,
    timed_out: bool = False,
    folder: str = "",
) -> Culprit | None:
    """Find the rank that the others waited for; None where what was found does not tell.

    ``inspection`` was taken before any rank was stopped. ``failed`` are the ranks that had failed by then because they
    waited (torch's own timeout, a lost connection), with the tracebacks that they left; ``folder`` is the job's, to
    which files are relative. ``timed_out``: whether they waited until torch's timeout.
    """
    gone = [_parse_failure(rank, traceback, folder) for rank, traceback in failed]
    if found := _of_store(inspection, failed, gone):
        return found
    until = _format_timeout(inspection, failed) if timed_out else ""
    all_waits = find_waits(inspection)
    for wait in sorted(all_waits, key=lambda wait: not wait.number):
        found = (
            _culprit_from_cycle(wait, all_waits, inspection)
            if wait.cycle
            else _culprit_from_wait(wait, inspection, gone, until)
        )
        if found:
            return found
    return _culprit_from_failures(inspection, gone, until)


def ended_before(inspection: Inspection, moment: float) -> str:
    """Which ranks had ended with exit code 0 when another lost its connection, and how long before that; "" for none.

    An end is seen a little later than its connections close.
    """
    ago = {rank.rank: moment - rank.ended for rank in inspection.ranks if rank.code == 0 and rank.ended is not None}
    ago = {rank: seconds for rank, seconds in ago.items() if seconds > -_SEEN_LATE}
    if not ago:
        return ""
    last = min(ago.values())
    when = f"{last:.1f} s before" if last >= 0.05 else "at that moment"
    if len(ago) > 1:
        return f"{format_ranks(ago)} had ended (exit code 0), the last of them {when}"
    return f"{format_ranks(ago)} {'had ' * (last >= 0.05)}ended {when} (exit code 0)"


def _parse_failure(rank: int, traceback: str, folder: str) -> _TimedOutRank:
    frames = parse_traceback(traceback, folder)
    call = distributed_call_in(frames)
    return _TimedOutRank(rank, call.function if call else "", user_frame(frames), bool(frames) and frames[0].own)


def _format_timeout(inspection: Inspection, failed: Sequence[tuple[int, str]]) -> str:
    """How long ranks have waited: " until the timeout (600 s)"."""
    for _, traceback in failed:
        if found := _TIMEOUT.search(traceback):
            return f" until the timeout ({int(found[1]) / 1000:g} s)"
    seconds = {each.timeout for rank in inspection.ranks for each in rank.last if not each.completed and each.timeout}
    return " until the timeout" + (f" ({seconds.pop():g} s)" if len(seconds) == 1 else "")


def _of_store(
    inspection: Inspection, failed: Sequence[tuple[int, str]], gone: Sequence[_TimedOutRank]
) -> Culprit | None:
    """Rank 0, where it held the store and has ended: whether it was to call what the others called is not known."""
    first = inspection.by_number.get(0)
    if first is None or not _ended_well(first) or not failed or not all(_STORE_LOST in each for _, each in failed):
        return None
    needed = " and ".join(sorted({each.function for each in gone if each.function}))
    sentence = f"rank 0 {describe_halt(first).before}, and with it the store, which {format_ranks(each.rank for each in gone)} still needed"
    return Culprit((0,), "", len(gone), None, sentence + (f" in {needed}" if needed else ""))


def _culprit_from_wait(
    wait: Wait, inspection: Inspection, failed: Sequence[_TimedOutRank], until: str
) -> Culprit | None:
    """The ranks that a wait lacks, those left out that had waited with the others and failed of it."""
    if wait.mismatched:
        entered, odd = wait.mismatched[-1]
        others = len(wait.waiting) - len(odd)
        said = f"ranks entered different collectives: {describe_mismatch(wait, inspection)}"
        return Culprit(
            odd, wait_title(wait), others, collective_entry_line(inspection.by_number[odd[0]], entered.operation), said
        )
    lost = {each.rank for each in failed}
    roots = {*wait.roots} - lost
    missing = [rank for rank in inspection.ranks if rank.rank in roots]
    waiters = len({*wait.waiting, *dict(wait.ahead), *(lost & set(wait.members) if wait.members else lost)})
    if not missing or (wait.operation in (*POINT_TO_POINT_FUNCTIONS, STORE_WAIT) and len(missing) > 1):
        return None  # it is one that they wait for, and nothing tells which
    if waiters < len(missing) and all(map(_ended_well, missing)):
        alone = inspection.by_number[wait.waiting[0]]
        return _culprit_still_running(short_wait_title(wait), wait.waiting, collective_entry_line(alone), missing)
    return _make_culprit(short_wait_title(wait), missing, inspection, waiters, until, counted=bool(wait.number))


def _culprit_from_failures(inspection: Inspection, failed: Sequence[_TimedOutRank], until: str) -> Culprit | None:
    """The ranks that remain where all that had waited have failed of it."""
    lost = {each.rank for each in failed}
    left = [rank for rank in inspection.ranks if rank.rank not in lost and _waits_for_nobody(rank)]
    functions = {each.function for each in failed if each.function}
    if not failed or not left:
        return _culprit_from_mismatch(inspection, failed)
    if INIT_FUNCTION in functions:
        left = [rank for rank in left if not rank.groups and rank.answers is not True]
        return _make_culprit(INIT_FUNCTION, left, inspection, len(failed), until, counted=False) if left else None
    if functions and functions <= POINT_TO_POINT_FUNCTIONS:
        name, missing = " and ".join(sorted(functions)), left
    else:
        name, missing = _next_collective(left, functions.pop() if len(functions) == 1 else "")
        name = "" if all(each.directly for each in failed) else name
    if functions & POINT_TO_POINT_FUNCTIONS and len(missing) > 1:
        return None
    if len(failed) < len(missing) and all(map(_ended_well, missing)):
        return _culprit_still_running(name, [each.rank for each in failed], failed[0].place, missing)
    return _make_culprit(name, missing, inspection, len(failed), until, counted=True)


def _culprit_from_mismatch(inspection: Inspection, failed: Sequence[_TimedOutRank]) -> Culprit | None:
    """The ranks that had waited in another function than most, where all had waited."""
    lost = {each.rank for each in failed}
    calls = [(each.function, each.rank, each.place) for each in failed]
    for rank in inspection.ranks:
        if rank.rank not in lost:
            call = distributed_call_of(rank)
            calls.append((call.function if call else "", rank.rank, call.place if call else None))
    functions = {function for function, _, _ in calls}
    if len(functions) < 2 or "" in functions or functions & POINT_TO_POINT_FUNCTIONS:
        return None
    by_function = [[call for call in sorted(calls, key=lambda call: call[1]) if call[0] == each] for each in functions]
    by_function.sort(key=lambda calls: (-len(calls), calls[0][1]))
    told = []
    for each in by_function:
        function, _, line = each[0]
        told.append(
            f"{function} on {format_ranks(rank for _, rank, _ in each)}" + (f" ({format_line(line)})" if line else "")
        )
    odd = by_function[-1]
    said = f"all ranks waited, but not in the same function: {', '.join(told[:-1])} and {told[-1]}"
    return Culprit(tuple(rank for _, rank, _ in odd), odd[0][0], len(calls) - len(odd), odd[0][2], said)


def _next_collective(left: Sequence[RankInspection], function: str) -> tuple[str, list[RankInspection]]:
    """The collective that others had entered and that these had not: the one after their last; and who is behind."""
    entered = {
        rank.rank: rank.last[-1].number if rank.last else rank.groups[0].enqueued
        for rank in left
        if len(rank.groups) == 1
    }
    furthest = min(entered.values(), default=0)
    behind = [rank for rank in left if entered.get(rank.rank, furthest) == furthest]
    number = f" #{furthest + 1}" if entered and function not in POINT_TO_POINT_FUNCTIONS else ""
    return (function or ("collective" if number else "")) + number, behind


def _make_culprit(
    name: str, missing: Sequence[RankInspection], inspection: Inspection, waiters: int, until: str, *, counted: bool
) -> Culprit | None:
    """Say that ranks have not come to where others waited for them."""
    numbers = tuple(rank.rank for rank in missing)
    states = {describe_halt(rank).before for rank in missing}
    state = states.pop() if len(states) == 1 else None
    waited = f"{waiters} rank{'s' * (waiters != 1)} waited"
    said = f"{format_ranks(numbers)} " + (f"{state} and " if state else "")
    if not name:
        said += f"did not come to where {waited}{until}"
    elif set(name.split(" and ")) <= POINT_TO_POINT_FUNCTIONS:
        said += f"did not communicate, while {waited} in {name}{until}"
    elif name == STORE_WAIT:
        said += f"did not set the key that {waited} for in {STORE_WAIT}"
    elif name == FILE_LOCK:
        said += f"held the lock that {waited} for in {FILE_LOCK}"
    else:
        said += f"did not {'enter' if counted else 'call'} {name}, which {waited} for{until}"
    apart = library_calls(inspection.ranks, missing)
    reasons: dict[str, list[int]] = {}
    for rank in missing:
        reason = (describe_halt(rank).before if state is None else "") or _describe_activity(rank, apart.get(rank.rank))
        reasons.setdefault(reason, []).append(rank.rank)
    if len(reasons) == 1:
        said += "".join(f": {what}" for what in reasons if what)
    else:
        told = [f"{format_ranks(each)} {what}" for what, each in reasons.items() if what]
        said += ": " + ", ".join(told[:_MAX_NAMED]) + " and others" * (len(told) > _MAX_NAMED)
    return Culprit(numbers, name, waiters, user_line_of(missing[0]), said)


def _describe_activity(rank: RankInspection, apart: Frame | None) -> str:
    native = "in native code that holds the GIL" if rank.answers is False and not describe_halt(rank).before else ""
    return ", ".join(filter(None, [describe_call(rank, apart), native]))


def _ended_well(rank: RankInspection) -> bool:
    return has_ended(rank) and (rank.code == 0 or rank.condition is ProcessCondition.ALIVE)


def _waits_for_nobody(rank: RankInspection) -> bool:
    """Whether a rank is known to wait for no other."""
    groups = {state.group for state in rank.groups}
    if (
        rank.moved
        or waiting_call_of(rank)
        or any(each.first_incomplete for group, each in group_progress(rank).items() if group in groups)
    ):
        return False
    known = rank.threads or rank.groups or rank.answers is False
    return bool(known) or has_ended(rank) or rank.condition is ProcessCondition.STOPPED


def _culprit_still_running(
    name: str, alone: Sequence[int], line: Frame | None, ended: Sequence[RankInspection]
) -> Culprit:
    """Say that a rank went on after all others had run to their ends."""
    said = f"{format_ranks(alone)} entered {name or 'a collective'}, which no other rank entered: "
    said += f"{format_ranks(rank.rank for rank in ended)} had {describe_halt(ended[0]).state}"
    said += f"; {format_location(line)}" if line else ""
    return Culprit(tuple(alone), name, len(alone), line, said)


def _culprit_from_cycle(wait: Wait, waits: Sequence[Wait], inspection: Inspection) -> Culprit:
    """Say that ranks have waited for each other, and each of them in what."""
    told: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in wait.cycle:
        inside = next((each for each in waits if rank in each.waiting or rank in dict(each.ahead)), wait)
        what = wait_title(inside) if rank in inside.waiting else f"#{dict(inside.ahead)[rank]} of {inside.group}"
        told.setdefault((what, inside.waiting), []).append(rank)
    said = f"{format_ranks(wait.cycle)} waited for each other, {format_cycle(wait.cycle)}: "
    said += ", ".join(f"{format_ranks(each)} in {what}" for (what, _), each in told.items())
    first = inspection.by_number[wait.cycle[0]]
    waiters = len({rank for each in waits for rank in each.waiting})
    return Culprit(tuple(sorted(wait.cycle)), wait_title(wait), waiters, collective_entry_line(first), said)
