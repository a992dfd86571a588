"""Histories of one inspection, without processes: what happens, when, and what the machine decides."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from ddplaunch.core.deadlines import Now
from ddplaunch.core.machine import Command, DeadlineDue, MachineEvent
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProcessCondition, RankInspection, Worker
from ddplaunch.observe.node import inspection_machine as machine
from ddplaunch.observe.node.inspection_machine import (
    INSPECTION_TRANSITIONS,
    InspectionMachine,
    InspectionPhase,
    StackDump,
)
from ddplaunch.observe.node.rank_reply import RankReply
from ddplaunch.observe.node.rank_stack_dump import SIGNAL_WAIT_ERROR
from tests.core.machine_histories import Step, step

ALIVE, STOPPED, EXITED = ProcessCondition.ALIVE, ProcessCondition.STOPPED, ProcessCondition.EXITED
BOTH = frozenset((0, 1))


class World:
    """Two ranks that are inspected from 10 s on the monotonic clock."""

    def __init__(self, detail: Detail = Detail.WAITS, timeout_s: float = 5.0) -> None:
        self.machine = InspectionMachine(detail, 2, "/job", began=10.0, timeout_s=timeout_s)
        self.found: Inspection | None = None

    def on(self, at: float, event: MachineEvent) -> list[str]:
        """Let an event happen at a moment; return the commands in a few words."""
        texts = []
        for command in self.machine.on(event, Now(at, 1e9 + at)):
            texts.append(describe(command))
            if isinstance(command, machine.FinishInspection):
                self.found = command.inspection
        return texts


def describe(command: Command) -> str:
    match command:
        case machine.StartDump(rank=rank):
            return f"dump {rank}"
        case machine.Request(ranks=ranks, details=details):
            return f"ask {', '.join(map(str, ranks))}" + " for details" * details
        case machine.StopAwaitingReplies(ranks=ranks):
            return f"stop listening to {', '.join(map(str, ranks))}"
        case machine.StartWorkerDumps(rank=rank, of_loader=of_loader):
            return f"dump {'workers' if of_loader else 'children'} of {rank}"
        case machine.Poll(later=later) | machine.ReadStates(later=later):
            return type(command).__name__ + " later" * later
    return type(command).__name__


def replay(history: Iterable[Step], world: World | None = None) -> World:
    world = world or World()
    for each in history:
        found = world.on(each.at, each.event)
        assert found == list(each.expected), f"at {each.at:g} s: {found}"
    return world


# ------------------------------------------------------------------------------------------------- events, in few words


def begun(
    *, threads: Iterable[int] = (0, 1), alive: frozenset[int] = BOTH, **conditions: ProcessCondition
) -> machine.InspectionBegun:
    """``conditions``: of rank0, rank1, where it is not alive."""
    found = {rank: RankInspection(rank, "n0", 7, conditions.get(f"rank{rank}", ALIVE)) for rank in (0, 1)}
    return machine.InspectionBegun(found, alive, frozenset(threads), {})


def asked(*ranks: int) -> machine.StatesRequested:
    return machine.StatesRequested(frozenset(ranks))


def reply(count: int = 5, completed: int = 4) -> RankReply:
    """``count`` operations in the group, the first ``completed`` of them are over."""
    status = f'{{"last_enqueued_collective": {count}, "last_completed_collective": {completed}}}'
    groups = f'[["0", "default_pg", [0, 1], {count}]]'
    trace = f'{{"pg_status": {{"0": {status}}}, "entries": []}}'
    return RankReply(True, groups.encode(), b"all_reduce all_reduce -1", (trace.encode(),))


def replied(rank: int, count: int = 5, completed: int = 4) -> machine.RankReplied:
    return machine.RankReplied(rank, reply(count, completed))


def polled(*, dumping: bool = False, alive: frozenset[int] = BOTH) -> machine.DumpsPolled:
    return machine.DumpsPolled(alive, dumping)


def dumps(why_not: str = "") -> machine.DumpsCollected:
    return machine.DumpsCollected({rank: StackDump(None, why_not) for rank in (0, 1)}, BOTH)


NO_WORKERS = machine.WorkerDumpsCollected({})
NONE_ENDED = machine.StatesRead({}, frozenset())
READ_ONCE = (
    step(10, begun(), "ask 0, 1"),
    step(10, asked(0, 1), "Poll"),
    step(10, polled(), "Poll later"),
    step(10.01, replied(0), "stop listening to 0", "dump 0"),
    step(10.01, replied(1), "stop listening to 1", "dump 1"),
    step(10.012, polled(dumping=True), "Poll later"),
    step(10.02, polled(), "CollectDumps"),
    step(10.02, dumps(), "Poll"),
    step(10.02, polled(), "CollectWorkerDumps"),
)

HISTORIES: dict[str, tuple[Step, ...]] = {
    "ranks that do not move are asked for details, twice at most": (
        *READ_ONCE,
        step(10.02, NO_WORKERS),
        step(10.1, DeadlineDue(), "ask 0, 1"),
        step(10.1, asked(0, 1), "Poll"),
        step(10.11, replied(0), "stop listening to 0"),
        step(10.11, replied(1, 4, 4), "stop listening to 1"),
        step(10.112, polled(), "ask 0 for details"),
        step(10.112, asked(0), "Poll"),
        step(10.2, replied(0), "stop listening to 0"),
        step(10.202, polled(), "ask 0 for details"),
        step(10.202, asked(0), "Poll"),
        step(10.3, replied(0), "stop listening to 0"),
        step(10.302, polled(), "ReadStates"),
        step(10.31, NONE_ENDED, "FinishInspection"),
    ),
    "ranks without process groups are read once": (
        step(10, begun(threads=()), "dump 0", "dump 1", "ask 0, 1"),
        step(10, asked(), "Poll"),
        step(10, polled(dumping=True), "Poll later"),
        step(10.002, polled(), "CollectDumps"),
        step(10.002, dumps(), "Poll"),
        step(10.002, polled(), "CollectWorkerDumps"),
        step(10.002, NO_WORKERS, "ReadStates"),
        step(10.003, NONE_ENDED, "FinishInspection"),
    ),
    "a rank that holds the GIL is dumped a moment later, and does not reply": (
        step(10, begun(), "ask 0, 1"),
        step(10, asked(0, 1), "Poll"),
        step(10.01, replied(0), "stop listening to 0", "dump 0"),
        step(10.02, polled(), "Poll later"),
        step(10.06, polled(), "dump 1", "Poll later"),
        step(10.2, polled(), "Poll later"),
        step(10.33, polled(), "stop listening to 1", "CollectDumps"),
        step(10.33, dumps(SIGNAL_WAIT_ERROR), "Poll"),
        step(10.33, polled(), "CollectWorkerDumps"),
    ),
    "a stopped rank is dumped at once, and not asked": (
        step(10, begun(rank1=STOPPED), "dump 1", "ask 0"),
        step(10, asked(0), "Poll"),
        step(10, replied(0), "stop listening to 0", "dump 0"),
    ),
    "a rank ends meanwhile, and its exit status is awaited": (
        step(10, begun(), "ask 0, 1"),
        step(10, asked(0, 1), "Poll"),
        step(10.01, replied(0), "stop listening to 0", "dump 0"),
        step(10.02, polled(alive=frozenset((0,))), "stop listening to 1", "CollectDumps"),
        step(10.02, machine.DumpsCollected({0: StackDump(None)}, frozenset((0,))), "Poll"),
        step(10.02, polled(alive=frozenset((0,))), "CollectWorkerDumps"),
        step(10.02, NO_WORKERS),
        step(10.1, DeadlineDue(), "ask 0, 1"),
        step(10.1, asked(0), "Poll"),
        step(10.11, replied(0, 6, 6), "stop listening to 0"),
        step(10.112, polled(alive=frozenset((0,))), "ReadStates"),
        step(
            10.112,
            machine.StatesRead({1: RankInspection(1, "n0", 7, EXITED)}, frozenset((1,))),
            "ReadStates later",
        ),
        step(10.2, machine.StatesRead({1: RankInspection(1, "n0", 0, EXITED, 3)}, frozenset()), "FinishInspection"),
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
def test_history(history: tuple[Step, ...]) -> None:
    replay(history)


def test_a_rank_that_moves_between_two_reads_is_known() -> None:
    world = replay(READ_ONCE)
    world.on(10.02, NO_WORKERS)
    for event in (DeadlineDue(), asked(0, 1), replied(0, 6, 5), replied(1), polled()):
        world.on(10.1, event)
    found = world.machine._found
    assert [found[rank].moved for rank in (0, 1)] == [True, False]


def test_what_is_found_after_a_rank_has_ended_and_another_is_silent() -> None:
    world = replay(HISTORIES["a rank ends meanwhile, and its exit status is awaited"])
    assert world.found is not None
    assert [(rank.condition, rank.code) for rank in world.found.ranks] == [(ALIVE, None), (EXITED, 3)]
    silent = replay(HISTORIES["a rank that holds the GIL is dumped a moment later, and does not reply"])
    assert [silent.machine._found[rank].answers for rank in (0, 1)] == [True, False]


@pytest.mark.parametrize("detail", [Detail.STATE, Detail.STACKS, Detail.LATENESS])
def test_other_details_take_one_read(detail: Detail) -> None:
    world = World(detail)
    first = world.on(10, begun())
    assert first == ["ask 0, 1" + " for details" * (detail is Detail.LATENESS)]
    seen = [text for event in (asked(0, 1), replied(0), replied(1)) for text in world.on(10, event)]
    assert ("dump 0" in seen) == (detail is Detail.STACKS)
    for event in (polled(), dumps(), polled(), NO_WORKERS, NONE_ENDED) if detail is not Detail.LATENESS else (
        polled(), NONE_ENDED,
    ):  # fmt: skip
        seen = world.on(10, event)
    assert seen == ["FinishInspection"]


def test_the_whole_takes_no_longer_than_its_timeout() -> None:
    world = replay(READ_ONCE, World(timeout_s=0.05))
    world.on(10.02, NO_WORKERS)
    assert world.machine.wake_at() == 10.05
    seen = world.on(10.05, DeadlineDue())
    while "ReadStates" not in seen:
        seen = world.on(10.05, asked(0, 1) if seen[0].startswith("ask") else polled(dumping=True))
    assert world.on(10.05, machine.StatesRead({}, BOTH)) == ["FinishInspection"]


def test_random_histories_end() -> None:
    """A world that replies to each command in its turn, with replies and ends of ranks at random moments."""
    phases = set[InspectionPhase]()
    for seed in range(300):
        random = Random(seed)
        world, at = World(random.choice([*Detail])), 10.0
        alive = set(BOTH)
        inbox: list[MachineEvent] = [begun(threads=random.sample((0, 1), random.randrange(3)))]
        asked_now: set[int] = set()
        for _ in range(100_000):
            if world.found is not None:
                break
            at += random.choice((0.0, 0.002, 0.05))
            if not inbox and (wake_at := world.machine.wake_at()) is not None:
                at = max(at, wake_at)
                inbox.append(DeadlineDue())
            if asked_now and random.random() < 0.3:
                inbox.insert(0, replied(asked_now.pop(), random.randrange(4, 7)))
            if random.random() < 0.02 and alive:
                alive.discard(random.choice(sorted(alive)))
            for command in world.machine.on(inbox.pop(0), Now(at, 1e9 + at)):
                match command:
                    case machine.Request(ranks=ranks):
                        asked_now = {rank for rank in ranks if rank in alive and random.random() < 0.8}
                        inbox.append(asked(*asked_now))
                    case machine.Poll():
                        inbox.append(polled(dumping=random.random() < 0.3, alive=frozenset(alive)))
                    case machine.CollectDumps():
                        inbox.append(machine.DumpsCollected({}, frozenset(alive)))
                    case machine.CollectWorkerDumps():
                        inbox.append(machine.WorkerDumpsCollected({0: (Worker(9),)}))
                    case machine.ReadStates():
                        gone = {rank: RankInspection(rank, "n0", 0, EXITED, 0) for rank in BOTH - alive}
                        inbox.append(machine.StatesRead(gone, frozenset()))
                    case machine.FinishInspection(inspection=inspection):
                        world.found = inspection
            phases.add(world.machine.phase)
        assert world.found is not None, seed
        assert len(world.found.ranks) == 2
        assert at < 16, "it takes no longer than its timeout, and one step"
    assert phases | {InspectionPhase.NEW} == set(INSPECTION_TRANSITIONS)
