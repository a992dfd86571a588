"""Ranks that do the same, together: in one state, with equal stacks."""

from __future__ import annotations

from collections.abc import Iterable

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.diagnosis.inspection import Condition, Inspection, RankInspection
from ddplaunch.diagnosis.sentences import BLOCKED, SILENT, halt
from ddplaunch.diagnosis.standing import call_of, waiting_for, workers_of
from ddplaunch.diagnosis.waits import Wait, short_title, stack_of, waits

RUNNING = "running"


@dataclass(frozen=True)
class Alike:
    """Ranks in one state whose main threads have equal stacks."""

    ranks: tuple[int, ...]
    state: str  # "running", "waits in all_reduce #5", "stopped (SIGSTOP)", "ended (exit code 0)"
    waited: float | None  # seconds since the first of them came to where they wait; None where it is not known
    example: RankInspection  # the first of them


def grouped(inspection: Inspection) -> tuple[Alike, ...]:
    """Group the ranks; the odd ones first, so smaller groups before larger, then by rank."""
    states = states_of(inspection)
    found: dict[object, list[RankInspection]] = {}
    for rank in inspection.ranks:
        found.setdefault((states[rank.rank], stack_of(rank), rank.no_stack, *workers_of(rank)), []).append(rank)
    groups = [
        Alike(tuple(rank.rank for rank in each), states[each[0].rank], _waited(each, inspection.moment), each[0])
        for each in found.values()
    ]
    return tuple(sorted(groups, key=lambda each: (len(each.ranks), each.ranks)))


def states_of(inspection: Inspection) -> dict[int, str]:
    """What each rank does, in few words (``Alike.state``)."""
    numbers = {}
    for wait in waits(inspection):
        numbers.update({rank: (wait, wait.number) for rank in wait.waiting})
        numbers.update({rank: (wait, number) for rank, number in wait.ahead})
    return {
        rank.rank: _waiting(rank, *numbers[rank.rank]) if rank.rank in numbers else _state(rank)
        for rank in inspection.ranks
    }


def _waiting(rank: RankInspection, wait: Wait, number: int) -> str:
    """What a rank waits in: its own operation, which may be another than that of the others."""
    exact = next((each.operation for each in rank.last if each.number == number and not each.completed), "")
    call = call_of(rank)
    same = wait.operation if number == wait.number and not wait.different else ""
    operation = exact or same or (call.function if call else "")
    return f"waits in {short_title(replace(wait, operation=operation, number=number))}"


def _waited(ranks: Iterable[RankInspection], moment: float) -> float | None:
    entered = [each.entered for rank in ranks for each in rank.last if not each.completed and each.entered]
    return max(moment - min(entered), 0.0) if entered else None


def _state(rank: RankInspection) -> str:
    if state := halt(rank).state:
        return state
    if rank.condition is Condition.BLOCKED:
        return BLOCKED
    return SILENT if rank.answers is False else waiting_for(rank) or rank.asleep or RUNNING
