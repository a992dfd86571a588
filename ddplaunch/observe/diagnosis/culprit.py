"""Finds the culprit of a failed job: the rank that the others waited for. The failure report begins with it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from ddplaunch.base.stack_frames import Frame, parse_traceback
from ddplaunch.base.text import format_ranks
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    FILE_LOCK,
    INIT_FUNCTION,
    POINT_TO_POINT_FUNCTIONS,
    STORE_WAIT,
    collective_entry_line,
    describe_rank_activity,
    differing_library_calls,
    distributed_call_in,
    distributed_call_of,
    format_line,
    format_location,
    group_progress,
    has_ended,
    user_frame,
    user_line_of,
    waiting_call_of,
)
from ddplaunch.observe.diagnosis.wait_chains import format_cycle
from ddplaunch.observe.diagnosis.wait_sentences import describe_halt, describe_mismatch
from ddplaunch.observe.diagnosis.waits import Wait, find_waits, short_wait_title, wait_title

_TIMEOUT = re.compile(r"(?:Timed out waiting |wait timeout after |Timeout\(ms\)=)(\d{1,12})")  # milliseconds
_STORE_LOST = "DistNetworkError"
"""The error of a rank that lost its connection to a store: the job's if a function of torch.distributed used it."""

_EXIT_DELAY_S = 1.0  # from the moment when a rank closes its connections until its end is noticed
_MAX_NAMED = 3


class Culprit(Struct, frozen=True):
    """The ranks that the others waited for, or that did something else than the others."""

    ranks: tuple[int, ...]
    collective: str  # the call that they did not enter: "all_reduce #4121", "init_process_group"; "" if unknown
    waiters: int  # how many ranks waited for them
    frame: Frame | None  # the user's line of the first of them
    text: str  # the sentence of the report


class _FailedWaiter(Struct, frozen=True):
    """A rank that failed only because it had waited for others."""

    rank: int
    function: str  # the function of torch.distributed that failed; "" if the traceback does not show it
    place: Frame | None  # the user's line
    directly: bool  # the user's line itself called what failed: the wait() of a send, or of a collective


def find_culprit(
    inspection: Inspection,
    failed: Sequence[tuple[int, str]] = (),
    *,
    timed_out: bool = False,
    folder: str = "",
) -> Culprit | None:
    """Find the rank that the others waited for; None if the inspection does not show it.

    Args:
        inspection: taken before any rank was stopped.
        failed: the ranks that had failed by then because they waited (torch's timeout, a lost connection), with their
            tracebacks.
        timed_out: the ``failed`` ranks waited until torch's timeout.
        folder: the job's folder; files are named relative to it.
    """
    gone = [_parse_failure(rank, traceback, folder) for rank, traceback in failed]
    if culprit := _culprit_from_store(inspection, failed, gone):
        return culprit
    until = _format_timeout(inspection, failed) if timed_out else ""
    all_waits = find_waits(inspection)
    for wait in sorted(all_waits, key=lambda wait: not wait.number):
        culprit = (
            _culprit_from_cycle(wait, all_waits, inspection)
            if wait.cycle
            else _culprit_from_wait(wait, inspection, gone, until)
        )
        if culprit:
            return culprit
    return _culprit_from_failures(inspection, gone, until)


def describe_ended_ranks(inspection: Inspection, moment: float) -> str:
    """Describe which ranks had ended with exit code 0, and how long before another lost its connection; "" if none.

    The end of a rank is noticed a little later than its connections close.
    """
    ago = {rank.rank: moment - rank.ended for rank in inspection.ranks if rank.code == 0 and rank.ended is not None}
    ago = {rank: seconds for rank, seconds in ago.items() if seconds > -_EXIT_DELAY_S}
    if not ago:
        return ""
    last = min(ago.values())
    when = f"{last:.1f} s before" if last >= 0.05 else "at that moment"
    if len(ago) > 1:
        return f"{format_ranks(ago)} had ended (exit code 0), the last of them {when}"
    return f"{format_ranks(ago)} {'had ' * (last >= 0.05)}ended {when} (exit code 0)"


def _parse_failure(rank: int, traceback: str, folder: str) -> _FailedWaiter:
    frames = parse_traceback(traceback, folder)
    call = distributed_call_in(frames)
    return _FailedWaiter(rank, call.function if call else "", user_frame(frames), bool(frames) and frames[0].own)


def _format_timeout(inspection: Inspection, failed: Sequence[tuple[int, str]]) -> str:
    """Format the timeout until which ranks have waited: " until the timeout (600 s)"."""
    for _, traceback in failed:
        if found := _TIMEOUT.search(traceback):
            return f" until the timeout ({int(found[1]) / 1000:g} s)"
    seconds = {each.timeout for rank in inspection.ranks for each in rank.last if not each.completed and each.timeout}
    return " until the timeout" + (f" ({seconds.pop():g} s)" if len(seconds) == 1 else "")


def _culprit_from_store(
    inspection: Inspection, failed: Sequence[tuple[int, str]], gone: Sequence[_FailedWaiter]
) -> Culprit | None:
    """Return rank 0 as the culprit if it ended while other ranks still needed its store; else None."""
    first = inspection.by_number.get(0)
    if (
        first is None
        or not _ended_without_error(first)
        or not failed
        or not all(_STORE_LOST in each for _, each in failed)
    ):
        return None
    if not all(each.function for each in gone):
        return None  # a store of the program's own
    needed = " and ".join(sorted({each.function for each in gone}))
    ranks = format_ranks(each.rank for each in gone)
    text = f"rank 0 {describe_halt(first).before}, and with it the store, which {ranks} still needed in {needed}"
    return Culprit((0,), "", len(gone), None, text)


def _culprit_from_wait(
    wait: Wait, inspection: Inspection, failed: Sequence[_FailedWaiter], until: str
) -> Culprit | None:
    """Return the missing ranks of a wait as the culprit, except those that failed because they had waited too."""
    if wait.mismatched:
        entered, odd = wait.mismatched[-1]
        others = len(wait.waiting) - len(odd)
        text = f"ranks entered different collectives: {describe_mismatch(wait, inspection)}"
        line = collective_entry_line(inspection.by_number[odd[0]], entered.operation)
        return Culprit(odd, wait_title(wait), others, line, text)
    lost = {each.rank for each in failed}
    roots = {*wait.root_causes} - lost
    missing = [rank for rank in inspection.ranks if rank.rank in roots]
    waiters = len({*wait.waiting, *dict(wait.ahead), *(lost & set(wait.members) if wait.members else lost)})
    if not missing or (wait.operation in (*POINT_TO_POINT_FUNCTIONS, STORE_WAIT) and len(missing) > 1):
        return None  # the ranks wait for one of these, and nothing shows for which
    if waiters < len(missing) and all(map(_ended_without_error, missing)):
        alone = inspection.by_number[wait.waiting[0]]
        return _culprit_from_ended_ranks(short_wait_title(wait), wait.waiting, collective_entry_line(alone), missing)
    return _make_culprit(short_wait_title(wait), missing, inspection, waiters, until, counted=bool(wait.number))


def _culprit_from_failures(inspection: Inspection, failed: Sequence[_FailedWaiter], until: str) -> Culprit | None:
    """Return the ranks that did not wait as the culprit, if each rank that waited has failed because of that."""
    lost = {each.rank for each in failed}
    left = [rank for rank in inspection.ranks if rank.rank not in lost and _is_not_waiting(rank)]
    functions = {each.function for each in failed if each.function}
    if not failed or not left:
        return _culprit_from_mismatch(inspection, failed)
    if not until and len(lost) == 1 and not any(has_ended(rank) or not rank.groups for rank in left):
        return None  # the connection broke: no peer had failed, or left its groups
    if INIT_FUNCTION in functions:
        left = [rank for rank in left if not rank.groups and rank.answers is not True]
        return _make_culprit(INIT_FUNCTION, left, inspection, len(failed), until, counted=False) if left else None
    if functions and functions <= POINT_TO_POINT_FUNCTIONS:
        name, missing = " and ".join(sorted(functions)), left
    else:
        name, missing = _find_missed_collective(left, functions.pop() if len(functions) == 1 else "")
        name = "" if all(each.directly for each in failed) else name
    if functions & POINT_TO_POINT_FUNCTIONS and len(missing) > 1:
        return None
    if len(failed) < len(missing) and all(map(_ended_without_error, missing)):
        return _culprit_from_ended_ranks(name, [each.rank for each in failed], failed[0].place, missing)
    return _make_culprit(name, missing, inspection, len(failed), until, counted=True)


def _culprit_from_mismatch(inspection: Inspection, failed: Sequence[_FailedWaiter]) -> Culprit | None:
    """If all ranks waited, return those that waited in another function than most ranks as the culprit."""
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
    parts = []
    for places in by_function:
        function, _, line = places[0]
        parts.append(
            f"{function} on {format_ranks(rank for _, rank, _ in places)}" + (f" ({format_line(line)})" if line else "")
        )
    odd = by_function[-1]
    text = f"all ranks waited, but not in the same function: {', '.join(parts[:-1])} and {parts[-1]}"
    return Culprit(tuple(rank for _, rank, _ in odd), odd[0][0], len(calls) - len(odd), odd[0][2], text)


def _find_missed_collective(left: Sequence[RankInspection], function: str) -> tuple[str, list[RankInspection]]:
    """Find the ranks that have entered the fewest collectives; return the name of their next one, and these ranks."""
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
    """Build the culprit from ranks that did not reach the point where others waited for them."""
    numbers = tuple(rank.rank for rank in missing)
    states = {describe_halt(rank).before for rank in missing}
    state = states.pop() if len(states) == 1 else None
    waited = f"{waiters} rank{'s' * (waiters != 1)} waited"
    text = f"{format_ranks(numbers)} " + (f"{state} and " if state else "")
    if not name:
        text += f"did not reach the point where {waited}{until}"
    elif set(name.split(" and ")) <= POINT_TO_POINT_FUNCTIONS:
        text += f"did not communicate, while {waited} in {name}{until}"
    elif name == STORE_WAIT:
        text += f"did not set the key that {waited} for in {STORE_WAIT}"
    elif name == FILE_LOCK:
        text += f"held the lock that {waited} for in {FILE_LOCK}"
    else:
        text += f"did not {'enter' if counted else 'call'} {name}, which {waited} for{until}"
    apart = differing_library_calls(inspection.ranks, missing)
    reasons: dict[str, list[int]] = {}
    for rank in missing:
        reason = (describe_halt(rank).before if state is None else "") or _describe_activity(rank, apart.get(rank.rank))
        reasons.setdefault(reason, []).append(rank.rank)
    if len(reasons) == 1:
        text += "".join(f": {what}" for what in reasons if what)
    else:
        parts = [f"{format_ranks(each)} {what}" for what, each in reasons.items() if what]
        text += ": " + ", ".join(parts[:_MAX_NAMED]) + " and others" * (len(parts) > _MAX_NAMED)
    return Culprit(numbers, name, waiters, user_line_of(missing[0]), text)


def _describe_activity(rank: RankInspection, apart: Frame | None) -> str:
    native = "in native code that holds the GIL" if rank.answers is False and not describe_halt(rank).before else ""
    return ", ".join(filter(None, [describe_rank_activity(rank, apart), native]))


def _ended_without_error(rank: RankInspection) -> bool:
    return has_ended(rank) and (rank.code == 0 or rank.condition is ProcessCondition.ALIVE)


def _is_not_waiting(rank: RankInspection) -> bool:
    """Whether a rank is known not to wait for others."""
    groups = {state.group for state in rank.groups}
    if (
        rank.moved
        or waiting_call_of(rank)
        or any(each.first_incomplete for group, each in group_progress(rank).items() if group in groups)
    ):
        return False
    known = rank.threads or rank.groups or rank.answers is False
    return bool(known) or has_ended(rank) or rank.condition is ProcessCondition.STOPPED


def _culprit_from_ended_ranks(
    name: str, alone: Sequence[int], line: Frame | None, ended: Sequence[RankInspection]
) -> Culprit:
    """Build the culprit from ranks that entered a collective after all other ranks had ended."""
    text = f"{format_ranks(alone)} entered {name or 'a collective'}, which no other rank entered: "
    gone = all(rank.condition is ProcessCondition.EXITED for rank in ended)
    over = f"had {describe_halt(ended[0]).state}" if gone else "had reached the end of the program"
    text += f"{format_ranks(rank.rank for rank in ended)} {over}"
    text += f"; {format_location(line)}" if line else ""
    return Culprit(tuple(alone), name, len(alone), line, text)


def _culprit_from_cycle(wait: Wait, waits: Sequence[Wait], inspection: Inspection) -> Culprit:
    """Build the culprit from ranks that waited for each other in a cycle; the text has the call that each waited in."""
    by_call: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in wait.cycle:
        inside = next((each for each in waits if rank in each.waiting or rank in dict(each.ahead)), wait)
        what = wait_title(inside) if rank in inside.waiting else f"#{dict(inside.ahead)[rank]} of {inside.group}"
        by_call.setdefault((what, inside.waiting), []).append(rank)
    text = f"{format_ranks(wait.cycle)} waited for each other, {format_cycle(wait.cycle)}: "
    text += ", ".join(f"{format_ranks(each)} in {what}" for (what, _), each in by_call.items())
    first = inspection.by_number[wait.cycle[0]]
    waiters = len({rank for each in waits for rank in each.waiting})
    return Culprit(tuple(sorted(wait.cycle)), wait_title(wait), waiters, collective_entry_line(first), text)
