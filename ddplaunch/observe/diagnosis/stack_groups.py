"""Groups the ranks of an inspection by state and stack."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import (
    describe_noncollective_wait,
    describe_workers,
    distributed_call_of,
    is_deadlocked_in_gloo,
)
from ddplaunch.observe.diagnosis.wait_sentences import BLOCKED_TEXT, SILENT_TEXT, describe_halt
from ddplaunch.observe.diagnosis.waits import Wait, find_waits, main_stack, short_wait_title

RUNNING = "running"


class StackGroup(Struct, frozen=True):
    """Ranks in the same state whose main threads have equal stacks."""

    ranks: tuple[int, ...]
    state: str  # "running", "waits in all_reduce #5", "stopped (SIGSTOP)", "ended (exit code 0)"
    waited_s: float | None  # seconds since the first of them began to wait; None if unknown
    example: RankInspection  # the lowest rank

    @property
    def description(self) -> str:
        """The state of the ranks, with the verb in singular or plural: "waits in all_reduce #5", "wait in …"."""
        return self.state if len(self.ranks) == 1 else re.sub("^waits", "wait", self.state)


def group_ranks(inspection: Inspection) -> tuple[StackGroup, ...]:
    """Group the ranks by state and stack: small groups first, as they are unusual; groups of equal size by rank."""
    states = rank_states(inspection)
    found: dict[object, list[RankInspection]] = {}
    for rank in inspection.ranks:
        found.setdefault((states[rank.rank], main_stack(rank), rank.no_stack, *describe_workers(rank)), []).append(rank)
    groups = [
        StackGroup(
            tuple(rank.rank for rank in each), states[each[0].rank], _wait_seconds(each, inspection.moment), each[0]
        )
        for each in found.values()
    ]
    return tuple(sorted(groups, key=lambda each: (len(each.ranks), each.ranks)))


def rank_states(inspection: Inspection) -> dict[int, str]:
    """Return the state of each rank in a few words (``StackGroup.state``)."""
    numbers = {}
    for wait in find_waits(inspection):
        numbers.update({rank: (wait, wait.number) for rank in wait.waiting})
        numbers.update({rank: (wait, number) for rank, number in wait.ahead})
    return {
        rank.rank: _format_wait(rank, *numbers[rank.rank]) if rank.rank in numbers else _state(rank)
        for rank in inspection.ranks
    }


def _format_wait(rank: RankInspection, wait: Wait, number: int) -> str:
    """Format what a rank waits in: its own operation, which may differ from that of the others."""
    exact = next((each.operation for each in rank.last if each.number == number and not each.completed), "")
    call = distributed_call_of(rank)
    same = wait.operation if number == wait.number and not wait.mismatched else ""
    operation = exact or same or (call.function if call else "")
    return f"waits in {short_wait_title(replace(wait, operation=operation, number=number))}"


def _wait_seconds(ranks: Iterable[RankInspection], moment: float) -> float | None:
    entered = [each.entered for rank in ranks for each in rank.last if not each.completed and each.entered]
    return max(moment - min(entered), 0.0) if entered else None


def _state(rank: RankInspection) -> str:
    if state := describe_halt(rank).state:
        return state
    if rank.condition is ProcessCondition.BLOCKED:
        return BLOCKED_TEXT
    if rank.answers is False and not is_deadlocked_in_gloo(rank):
        return SILENT_TEXT
    return describe_noncollective_wait(rank) or rank.asleep or RUNNING
