"""Formats waits as sentences for users: who waits for whom, and why the missing ranks are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_count, format_ranks, join_names
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    FILE_LOCK,
    INIT_FUNCTION,
    POINT_TO_POINT_FUNCTIONS,
    ROOTED_FUNCTIONS,
    RPC_CALLS,
    SEND_FUNCTIONS,
    STORE_WAIT,
    collective_entry_line,
    describe_rank_activity,
    differing_library_calls,
    format_exit,
    format_line,
    format_location,
    has_ended,
    is_deadlocked_in_gloo,
    root_of,
    rpc_callee_line_of,
    user_line_of,
)
from ddplaunch.observe.diagnosis.wait_chains import format_cycle
from ddplaunch.observe.diagnosis.waits import MissingRank, Wait, find_waits, format_partner, wait_title

_PLURAL = {"has": "have", "is": "are", "does": "do", "holds": "hold", "makes": "make"}
_MAX_PAIRS = 4

MOVES_TEXT = "makes progress"
SILENT_TEXT = "does not respond (native code holds the GIL)"
BLOCKED_TEXT = "blocked in the kernel, by a disk or a driver"
_HALT_TEXTS = {
    ProcessCondition.STOPPED: ("is", "was", "stopped (SIGSTOP)"),
    ProcessCondition.PENDING: ("has", "had", "not started"),
    ProcessCondition.REPLACED: ("has become", "had become", "another program"),
    ProcessCondition.ENDING: ("is", "was", "ending"),
}


class HaltText(NamedTuple):
    """Why a rank does not run, in words; all "" if it runs."""

    state: str  # "stopped (SIGSTOP)"
    now: str  # "is stopped (SIGSTOP)"
    before: str  # "was stopped (SIGSTOP)"


def describe_waits(inspection: Inspection) -> tuple[str, ...]:
    """Describe all waits, the causes first; or that no rank waits."""
    found = find_waits(inspection)
    if found:
        return tuple(describe_wait(wait, inspection) for wait in found)
    return (_describe_no_wait(inspection),)


def describe_wait(wait: Wait, inspection: Inspection) -> str:
    """Describe one wait: who waits for whom."""
    if wait.mismatched:
        mismatch = f"{describe_mismatch(wait, inspection)}: they wait for each other"
        return "; ".join([mismatch, *(_describe_missing(wait, inspection) if wait.missing else [])])
    text = f"{format_ranks(wait.waiting)} {_conjugate('waits', wait.waiting)} in {_full_title(wait, inspection)}"
    if wait.entry_lines:
        text += f", {'entered' if wait.number else 'called'} at {_format_lines(wait.entry_lines)}"
    for number in sorted({number for _, number in wait.ahead}):
        text += f", {format_ranks(rank for rank, each in wait.ahead if each == number)} in #{number}"
    # "No other rank": the count or the stack of each shows that it is elsewhere. A rank without both may be inside.
    roots = [inspection.by_number[rank] for rank in wait.root_causes]
    shown = [rank for rank in roots if rank.answers is not False or user_line_of(rank)]
    if len(wait.waiting) == 1 and not wait.has_unreachable_members and 1 < len(shown) == len(inspection.ranks) - 1:
        text += ", which no other rank has entered" if wait.number else ", which no other rank has called"
    return "; ".join([text, *_describe_missing(wait, inspection)])


def _full_title(wait: Wait, inspection: Inspection) -> str:
    """Return the title of a wait with its group's members, its tensors or the keys of a store, as far as known."""
    tensors = wait.collective.tensors if wait.collective else ""
    calls = [inspection.by_number[rank].inside for rank in wait.waiting] if wait.operation == STORE_WAIT else []
    keys = join_names(dict.fromkeys(each.key for each in calls if each and each.key))
    details = [format_ranks(wait.members) if wait.members else "", tensors, keys]
    shown = "; ".join(filter(None, details))
    return wait_title(wait) + _format_partners(wait) + (f" ({shown})" if shown else "")


def _format_partners(wait: Wait) -> str:
    """Format the partners of ranks in send or recv: " from rank 2", " (1 from 2, 2 from 3)"; of many only some."""
    if len(wait.waiting) == 1:
        return format_partner(wait, wait.waiting[0])
    if wait.operation == FILE_LOCK:
        return ""
    preposition = "to" if wait.operation in SEND_FUNCTIONS else "from"
    pairs = [f"{rank} {preposition} {other}" for rank, other in wait.partners]
    return f" ({', '.join(pairs[:_MAX_PAIRS])}{', …' * (len(pairs) > _MAX_PAIRS)})" if pairs else ""


def _describe_missing(wait: Wait, inspection: Inspection) -> list[str]:
    if not wait.missing:
        return [
            f"they wait for each other: {format_cycle(wait.cycle)}"
            if wait.cycle
            else _describe_wait_without_missing(wait, inspection)
        ]
    by_number = inspection.by_number
    apart = differing_library_calls(inspection.ranks, [by_number[each.rank] for each in wait.missing if not each.waits])
    reasons: dict[str, list[int]] = {}
    for each in wait.missing:
        reasons.setdefault(_why_missing(wait, each, by_number[each.rank], apart.get(each.rank)), []).append(each.rank)
    parts = [f"{format_ranks(numbers)} {_pluralize(why, numbers)}" for why, numbers in reasons.items()]
    if len(parts) > 4:
        parts = [*parts[:3], f"{format_ranks(n for each in list(reasons.values())[3:] for n in each)} too"]
    return [*parts, f"they wait for each other: {format_cycle(wait.cycle)}"] if wait.cycle else parts


def _describe_wait_without_missing(wait: Wait, inspection: Inspection) -> str:
    """Describe why ranks wait although no rank is missing.

    The text "have entered it" needs from each member a number that is as high; "wait too" and "are in it" need from
    each rank a stack in such a call. Ranks without this evidence are named instead, or the text says that some are
    unknown.
    """
    if wait.uncertain:
        by_number = inspection.by_number
        reasons: dict[str, list[int]] = {}
        for rank in wait.uncertain:
            reasons.setdefault(MOVES_TEXT if by_number[rank].moved else SILENT_TEXT, []).append(rank)
        return "; ".join(f"{format_ranks(ranks)} {_pluralize(why, ranks)}" for why, ranks in reasons.items())
    if wait.has_unreachable_members:
        return "not all of its ranks could be inspected" if wait.number else "not all ranks could be inspected"
    if wait.number:
        return "all its ranks have entered it: the data is on its way"
    if wait.partners_match:
        others = [other for _, other in wait.partners]
        does = "receives from" if wait.operation in SEND_FUNCTIONS else "sends to"
        it = "it" if len(wait.waiting) == 1 else "them"
        return f"{format_ranks(others)} {_conjugate(does, others)} {it}: the data is on its way, or the tags differ"
    if wait.operation == INIT_FUNCTION:
        return _describe_wrong_init_arguments(wait, inspection) or (
            "all ranks have called it: they are connecting, or cannot reach each other"
        )
    if len(wait.waiting) == inspection.world_size and wait.operation == STORE_WAIT:
        return "all ranks wait for a key that none has set"
    if len(wait.waiting) == inspection.world_size:
        return "all ranks are in it: the data is on its way, or their groups differ"
    return "all other ranks wait too"


def _describe_wrong_init_arguments(wait: Wait, inspection: Inspection) -> str:
    """Describe with which world sizes and ranks ``init_process_group`` was called, if these cannot be right; else "".

    The evidence is in the variables of these calls. Nothing shows that ranks "cannot reach each other": that
    sentence is used when no other cause is known.
    """
    calls = {rank: inside for rank in wait.waiting if (inside := inspection.by_number[rank].inside)}
    sizes: dict[int, list[int]] = {}
    given: dict[int, list[int]] = {}
    for rank, call in calls.items():
        if call.world_size:
            sizes.setdefault(call.world_size, []).append(rank)
        if call.world_size and call.names is not None:
            given.setdefault(call.names, []).append(rank)
    wrong = {size: ranks for size, ranks in sizes.items() if size != inspection.world_size}
    if wrong:
        some = [
            f"world_size={size}" + (f" on {format_ranks(ranks)}" if len(ranks) < len(wait.waiting) else "")
            for size, ranks in wrong.items()
        ]
        has = format_count(inspection.world_size, "rank")
        return f"it was called with {', '.join(some[:_MAX_PAIRS])}, but the job has {has}"
    twice = [f"{format_ranks(ranks)} called it with rank={rank}" for rank, ranks in given.items() if len(ranks) > 1]
    return "; ".join(twice[:_MAX_PAIRS])


def _why_missing(wait: Wait, missing: MissingRank, rank: RankInspection, apart: Frame | None) -> str:
    """Describe why a rank is not where others wait, as a verb phrase; ``apart``: see ``describe_rank_activity``."""
    if state := describe_halt(rank).now:
        return state
    if missing.waits:
        line = collective_entry_line(rank, missing.calls.partition(" ")[0])
        return f"{_format_absence(wait)}: it waits in {missing.calls}" + (f", {format_location(line)}" if line else "")
    line = rpc_callee_line_of(rank) if wait.operation in RPC_CALLS else None
    what = format_location(line) if line else describe_rank_activity(rank, apart)
    if rank.condition is ProcessCondition.BLOCKED:
        what = f"it is {BLOCKED_TEXT}" + (f", {what}" if what else "")
    if rank.answers is False and not is_deadlocked_in_gloo(rank):
        return SILENT_TEXT + (f": {what}" if what else "")
    return _format_absence(wait) + (f": {what}" if what else "")


def _format_absence(wait: Wait) -> str:
    if wait.number:
        return "has not entered it"
    if wait.operation in POINT_TO_POINT_FUNCTIONS and wait.partners:
        return "does not receive" if wait.operation in SEND_FUNCTIONS else "does not send"
    if wait.operation in POINT_TO_POINT_FUNCTIONS:
        return "does not communicate"
    if wait.operation == STORE_WAIT:
        return "has not set its key"
    if wait.operation == FILE_LOCK:
        return "holds the lock"
    if wait.operation in RPC_CALLS:
        return "has not replied"
    return "has not called it"


def describe_halt(rank: RankInspection) -> HaltText:
    """Describe why a rank does not run; empty texts if it runs."""
    if words := _HALT_TEXTS.get(rank.condition):
        is_, was, state = words
        return HaltText(state, f"{is_} {state}", f"{was} {state}")
    if rank.condition is ProcessCondition.EXITED:  # the only evidence for "has ended": its process is gone
        state = "ended" if rank.code is None else f"ended ({format_exit(rank.code)})"
        return HaltText(state, f"has {state}", state)
    state = rank.outside or ("ending" if has_ended(rank) else "")  # or the rank has failed, which nothing shows yet
    return HaltText(state, f"is {state}", f"was {state}") if state else HaltText("", "", "")


def describe_mismatch(wait: Wait, inspection: Inspection) -> str:
    """Describe the different collectives that ranks have entered under the same number in a process group."""
    by_number = inspection.by_number
    roots = [root_of(by_number[numbers[0]], each) for each, numbers in wait.mismatched]
    rooted = None not in roots and len(set(roots)) > 1
    kinds = {(each.operation, root if rooted else None) for (each, _), root in zip(wait.mismatched, roots, strict=True)}
    tensors = len(kinds) < len(wait.mismatched)
    parts = []
    for (call, numbers), root in zip(wait.mismatched, roots, strict=True):
        line = collective_entry_line(by_number[numbers[0]], call.operation)
        what = call.operation + (f" of {call.tensors or 'nothing'}" if tensors else "")
        what += f" {ROOTED_FUNCTIONS[call.operation]} rank {root}" if rooted else ""
        parts.append(f"{what} on {format_ranks(numbers)}" + (f" ({format_line(line)})" if line else ""))
    return f"#{wait.number} of {wait.group} is {', '.join(parts[:-1])} and {parts[-1]}"


def _describe_no_wait(inspection: Inspection) -> str:
    alive = [rank for rank in inspection.ranks if not has_ended(rank)]
    awaited = [each.program for each in inspection.programs if each.state in ("waiting", "starting")]
    if awaited and not (inspection.ranks or inspection.silent):
        return f"no rank has started: {join_names(awaited)} {'are' if len(awaited) > 1 else 'is'} not ready"
    if not alive and (inspection.silent or len(inspection.ranks) < inspection.world_size):
        return "the state of the ranks is unknown"
    if not alive:
        gone = (ProcessCondition.EXITED, ProcessCondition.REPLACED)
        are_gone = all(rank.condition in gone for rank in inspection.ranks)
        return "all ranks have ended" if are_gone else "all ranks have ended or are ending"
    moved = sum(rank.moved for rank in alive)
    if moved:
        return f"no rank waits for another rank: {moved} of {len(alive)} have completed collectives in the last 0.1 s"
    if few := describe_uneven_counts(alive):
        return f"no rank is known to wait, but {few}"
    if any(rank.groups for rank in alive) and not any(rank.answers for rank in alive):
        return "no rank is known to wait: this torch does not record collectives"
    return "no rank waits for another rank"


def describe_uneven_counts(ranks: Sequence[RankInspection]) -> str:
    """Describe which ranks have begun fewer operations of a group than others; "" if all have begun the same number.

    Sends count too, so this proves nothing; but without a flight recorder nothing else is known.
    """
    parts: list[str] = []
    for count, some in find_uneven_counts(ranks).items():
        verb = "has" if len(some) == 1 else "have"
        parts.append(f"{format_ranks(each.rank for each in some)} {verb} begun {count}")
        if len(parts) == 1:
            what = describe_rank_activity(some[0])
            parts[0] += f" operations of one group{f' ({what})' if what else ''}"
    return ", ".join(parts[:_MAX_PAIRS])


def find_uneven_counts(ranks: Sequence[RankInspection]) -> dict[int, list[RankInspection]]:
    """Group the ranks by how many operations they have begun, fewest first, in the first group where these differ.

    Ranks that have ended are left out. Empty if a flight recorder has replied: it shows who waits; numbers do not.
    """
    if any(rank.answers for rank in ranks):
        return {}
    groups: dict[str, dict[int, list[RankInspection]]] = {}
    for rank in ranks:
        for each in () if has_ended(rank) else rank.groups:
            groups.setdefault(each.group, {}).setdefault(each.enqueued, []).append(rank)
    first = next((by_count for _, by_count in sorted(groups.items()) if len(by_count) > 1), {})
    return dict(sorted(first.items()))


def _format_lines(places: Sequence[Frame]) -> str:
    return join_names(map(format_line, places[:3])) + (" and elsewhere" if len(places) > 3 else "")


def _conjugate(verb: str, numbers: Sequence[int]) -> str:
    first, space, rest = verb.partition(" ")
    return verb if len(numbers) == 1 else first.removesuffix("s") + space + rest


def _pluralize(why: str, numbers: Sequence[int]) -> str:
    """Turn a sentence about one rank into one about several."""
    if len(numbers) == 1:
        return why
    verb, space, rest = why.partition(" ")
    return _PLURAL.get(verb, verb) + space + rest.replace(": it waits", ": they wait").replace(": it is", ": they are")
