"""Decides one inspection of this node's ranks, as a state machine: ``core/machine.py`` has the rules of all machines.

- READING: the stacks of all ranks are dumped, and each is asked for the state of its collectives. A rank with a thread
  of ours is dumped once it has replied, which shows that it handles the stack signals, or a moment later.
- WORKERS: the stacks of the children that ranks wait for, as the workers of a DataLoader.
- PAUSING: ranks that are in a collective are read a second time soon, as one that moves is not waiting. Then those that
  decide who waits for whom are asked for details, twice at most.
- ENDING: a rank that has ended has an exit status, once the zygote has reported it.
- Each phase has a timeout, and the inspection has one: replies that come later are left out.

``RankInspector`` has the processes and sockets: it gives this machine its events, and executes its commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.core.deadlines import Now
from ddplaunch.core.machine import Command, DeadlineDue, Machine, MachineEvent, Transitions, next_phase
from ddplaunch.observe.diagnosis.flight_recorder_arrivals import operations_per_rank, parse_arrivals
from ddplaunch.observe.diagnosis.inspection import (
    Detail,
    Inspection,
    ProcessCondition,
    RankInspection,
    Worker,
)
from ddplaunch.observe.diagnosis.rank_position import (
    DATALOADER_WAIT_TEXT,
    WAITS_FOR_CHILDREN,
    describe_noncollective_wait,
)
from ddplaunch.observe.diagnosis.stack_parser import find_stage_outside_program, parse_dump
from ddplaunch.observe.diagnosis.waits import ranks_to_query
from ddplaunch.observe.node import dataloader_workers
from ddplaunch.observe.node.rank_reply import RankReply, add_group_states, add_last_collectives
from ddplaunch.observe.node.rank_stack_dump import ENDING_ERROR, REPLACED_ERROR, SIGNAL_WAIT_ERROR

RECHECK_INTERVAL_S = 0.1  # between the two reads of the collectives: a rank that moves is not waiting
READ_TIMEOUT_S = 0.3  # for a read, and more for each rank: one that holds the GIL never replies
READ_TIMEOUT_PER_RANK_S = 0.01
SIGNAL_CHECK_TIMEOUT_S = 0.05  # for a rank to confirm that it handles the stack signals; one that holds the GIL cannot
DETAILS_TIMEOUT_S = 1.0  # for the last collectives, which a rank takes up to 0.4 s to serialize
EXIT_STATUS_TIMEOUT_S = 1.0  # for the exit status of a rank, which the kernel gives to its parent, the zygote, alone
_MAX_ROUNDS = 4  # two reads, and details twice
_CONDITION_BY_DUMP_ERROR = {REPLACED_ERROR: ProcessCondition.REPLACED, ENDING_ERROR: ProcessCondition.ENDING}
_GONE = (ProcessCondition.EXITED, ProcessCondition.PENDING)


class InspectionPhase(Enum):
    """The phase of an inspection."""

    NEW = "not begun"
    READING = "dumps and replies are awaited"
    WORKERS = "the stacks of children are awaited"
    PAUSING = "the second read follows soon"
    ENDING = "exit statuses are awaited"
    DONE = "complete"


class InspectionStep(Enum):
    """A step from one phase of an inspection to another."""

    READ = "ask ranks for their collectives"
    DUMP_WORKERS = "dump the stacks of children"
    PAUSE = "wait before the second read"
    END = "wait for exit statuses"
    FINISH = "report"


INSPECTION_TRANSITIONS: Transitions[InspectionPhase, InspectionStep] = {
    InspectionPhase.NEW: {InspectionStep.READ: InspectionPhase.READING},
    InspectionPhase.READING: {
        InspectionStep.READ: InspectionPhase.READING,  # for details
        InspectionStep.DUMP_WORKERS: InspectionPhase.WORKERS,
        InspectionStep.END: InspectionPhase.ENDING,
    },
    InspectionPhase.WORKERS: {
        InspectionStep.PAUSE: InspectionPhase.PAUSING,
        InspectionStep.END: InspectionPhase.ENDING,
    },
    InspectionPhase.PAUSING: {InspectionStep.READ: InspectionPhase.READING},
    InspectionPhase.ENDING: {InspectionStep.FINISH: InspectionPhase.DONE},
    InspectionPhase.DONE: {},
}

# -------------------------------------------------------------------------------------------------------------- events


class InspectionBegun(MachineEvent, frozen=True):
    """The inspection begins, with what is known of each rank without a reply from that rank."""

    inspected: Mapping[int, RankInspection]
    alive: frozenset[int]  # ranks with a process
    with_thread: frozenset[int]  # those that can confirm that they handle the stack signals
    reasons: Mapping[int, str]  # why a rank cannot be inspected


class StatesRequested(MachineEvent, frozen=True):
    """Reply to ``Request``: the ranks that can reply, to which the request was sent."""

    ranks: frozenset[int]


class RankReplied(MachineEvent, frozen=True):
    """A rank has replied to a request for the state of its collectives."""

    rank: int
    reply: RankReply


class DumpsPolled(MachineEvent, frozen=True):
    """Reply to ``Poll``: which ranks have a process, and whether a dump is not complete yet."""

    is_recorded = False

    alive: frozenset[int]
    is_dumping: bool


class StackDump(Struct, frozen=True):
    """The text of a rank's stack dump, or why there is none."""

    text: bytes | None
    why_not: str = ""


class DumpsCollected(MachineEvent, frozen=True):
    """Reply to ``CollectDumps``; ``awaiting``: ranks that have a process and a channel now."""

    dumps: Mapping[int, StackDump]
    awaiting: frozenset[int]


class WorkerDumpsCollected(MachineEvent, frozen=True):
    """Reply to ``CollectWorkerDumps``: the child processes of each rank, with their stacks."""

    workers: Mapping[int, tuple[Worker, ...]]


class StatesRead(MachineEvent, frozen=True):
    """Reply to ``ReadStates``: the ranks that have ended, and those of them whose exit status is awaited."""

    ended: Mapping[int, RankInspection]
    awaited: frozenset[int]


# ------------------------------------------------------------------------------------------------------------ commands


class StartDump(Command, frozen=True):
    """Have a rank dump its stacks."""

    rank: int
    condition: ProcessCondition


class Request(Command, frozen=True):
    """Ask ranks how far they are; with ``details``, also for the last collectives. Reply: ``StatesRequested``."""

    ranks: tuple[int, ...]
    details: bool


class StopAwaitingReplies(Command, frozen=True):
    """Do not wait for replies of these ranks any more."""

    ranks: tuple[int, ...]


class Poll(Command, frozen=True):
    """Check whether stack dumps are complete; ``later``: after a short delay. The reply is ``DumpsPolled``."""

    later: bool = False


class CollectDumps(Command, frozen=True):
    """Collect the stack dumps, and discard incomplete ones; the reply is ``DumpsCollected``."""


class StartWorkerDumps(Command, frozen=True):
    """Begin to dump the stacks of a rank's child processes; ``of_loader``: only the workers of its DataLoader."""

    rank: int
    of_loader: bool


class CollectWorkerDumps(Command, frozen=True):
    """Collect the stacks of child processes, and discard incomplete ones; the reply is ``WorkerDumpsCollected``."""


class ReadStates(Command, frozen=True):
    """Read which ranks have ended; ``later``: after a short delay. The reply is ``StatesRead``."""

    later: bool = False


class FinishInspection(Command, frozen=True):
    """Report the inspection, which is complete."""

    inspection: Inspection


class InspectionMachine(Machine):
    """Inspects the ranks of a node once, from ``InspectionBegun`` until ``FinishInspection``."""

    def __init__(self, detail: Detail, world_size: int, folder: str, *, began: float, timeout_s: float) -> None:
        """``folder``: of the job; ``began``: on the monotonic clock."""
        super().__init__()
        self._detail, self._world_size, self._folder, self._began = detail, world_size, folder, began
        self._deadline = began + timeout_s
        self._part_deadline = self._deadline  # of the present phase
        self._recheck_at: float | None = None
        self.phase = InspectionPhase.NEW
        self._round = 0
        self._found: dict[int, RankInspection] = {}
        self._pending: set[int] = set()  # ranks that have not replied yet
        self._counts: dict[int, bytes] = {}  # the operations in the groups of each rank, at the first read
        self._outer: dict[int, bytes] = {}  # the outer frames of ranks whose stack is deep
        self._unconfirmed: list[int] = []  # ranks that have not confirmed that they handle the stack signals

    def wake_at(self) -> float | None:
        return self._recheck_at

    def _handle(self, event: MachineEvent, now: Now) -> None:
        match event:
            case InspectionBegun():
                self._on_begun(event, now)
            case StatesRequested(ranks=ranks):
                self._pending = {*ranks}
                self._do(Poll())
            case RankReplied(rank=rank, reply=reply) if rank in self._pending:
                self._on_reply(rank, reply)
            case DumpsPolled(alive=alive, is_dumping=is_dumping):
                self._on_polled(alive, now, is_dumping=is_dumping)
            case DumpsCollected(dumps=dumps, awaiting=awaiting):
                self._add_stacks(dumps)
                self._start_workers(awaiting, now)
            case WorkerDumpsCollected(workers=workers):
                self._on_workers(workers, now)
            case DeadlineDue():
                self._recheck_at = None
                self._read(now)
            case StatesRead():
                self._on_states(event, now)

    def _take_step(self, step: InspectionStep) -> None:
        self.phase = next_phase(INSPECTION_TRANSITIONS, self.phase, step)

    def _set_phase_deadline(self, seconds: float, now: Now) -> None:
        self._part_deadline = min(now.mono + seconds, self._deadline)

    # ----------------------------------------------------------------------------------------- dumps and the first read

    def _on_begun(self, begun: InspectionBegun, now: Now) -> None:
        self._found = dict(begun.inspected)
        if self._detail in (Detail.STACKS, Detail.WAITS):
            for rank, inspected in begun.inspected.items():
                if inspected.condition in _GONE or rank not in begun.alive:
                    continue
                if why := begun.reasons.get(rank):
                    self._found[rank] = replace(inspected, no_stack=why)
                elif rank in begun.with_thread and inspected.condition is not ProcessCondition.STOPPED:
                    self._unconfirmed.append(rank)
                else:
                    self._start_dump(rank)
        self._read(now, tuple(self._found) if self._detail is Detail.LATENESS else None)

    def _start_dump(self, rank: int) -> None:
        if rank in self._unconfirmed:
            self._unconfirmed.remove(rank)
        self._do(StartDump(rank, self._found[rank].condition))

    def _read(self, now: Now, only: tuple[int, ...] | None = None) -> None:
        """Request the state of all ranks, or the last collectives of the ranks ``only``."""
        self._take_step(InspectionStep.READ)
        self._round += 1
        ranks = only if only is not None else tuple(self._found)
        running = tuple(rank for rank in ranks if self._found[rank].condition is not ProcessCondition.STOPPED)
        timeout_s = READ_TIMEOUT_S + READ_TIMEOUT_PER_RANK_S * len(self._found) if only is None else DETAILS_TIMEOUT_S
        self._set_phase_deadline(timeout_s, now)
        self._do(Request(running, only is not None))

    def _on_reply(self, rank: int, reply: RankReply) -> None:
        self._pending.discard(rank)
        self._do(StopAwaitingReplies((rank,)))
        if rank in self._unconfirmed:
            self._start_dump(rank)
        inspected = self._found[rank]
        try:
            self._found[rank] = self._add_reply(rank, inspected, reply)
        except (ValueError, TypeError):  # the program has written to the channel
            self._found[rank] = replace(inspected, answers=None)

    def _add_reply(self, rank: int, inspected: RankInspection, reply: RankReply) -> RankInspection:
        if self._detail is Detail.LATENESS:
            most = operations_per_rank(self._world_size)
            arrivals = [each for trace in reply.traces for each in parse_arrivals(rank, trace, most)]
            return replace(inspected, answers=reply.initialised or None, arrivals=tuple(arrivals))
        if self._round == 1:
            self._counts[rank], self._outer[rank] = reply.groups, reply.outer
            return add_group_states(inspected, reply)
        if self._round > 2:
            return add_last_collectives(inspected, reply)
        again = add_group_states(inspected, reply)
        if rank not in self._counts:  # its first reply: there is nothing to compare it with
            return again
        moved = again.groups != inspected.groups or reply.groups != self._counts[rank]
        return replace(inspected, groups=again.groups, moved=moved, inside=again.inside)

    def _on_polled(self, alive: frozenset[int], now: Now, *, is_dumping: bool) -> None:
        """Continue with the next step once all replies and stack dumps have come, or the timeout has expired."""
        for rank in [*self._unconfirmed]:
            if rank not in self._pending or now.mono - self._began > SIGNAL_CHECK_TIMEOUT_S:
                if rank in alive:
                    is_dumping = True
                    self._start_dump(rank)
                else:
                    self._unconfirmed.remove(rank)
        if (self._pending & alive or is_dumping) and now.mono < self._part_deadline:
            return self._do(Poll(later=True))
        if self._pending:
            self._do(StopAwaitingReplies(tuple(self._pending)))
        for rank in self._pending & alive if self._round == 1 else ():
            self._found[rank] = replace(self._found[rank], answers=False)
        self._pending.clear()
        if self.phase is InspectionPhase.WORKERS:
            self._do(CollectWorkerDumps())
        elif self._detail is Detail.LATENESS:
            self._end(now)
        elif self._round == 1:
            self._do(CollectDumps())
        else:
            self._read_details(now)

    def _add_stacks(self, dumps: Mapping[int, StackDump]) -> None:
        for rank, dump in dumps.items():
            inspected, outer, text, why_not = self._found[rank], self._outer.get(rank, b""), dump.text, dump.why_not
            if why_not == SIGNAL_WAIT_ERROR and outer:  # they begin at the innermost frame
                why_not, text, outer = "", outer.replace(b"Outer frames", b"Current thread 0x0"), b""
            threads = parse_dump(text, self._folder, outer=outer) if text else ()
            condition = _CONDITION_BY_DUMP_ERROR.get(why_not, inspected.condition)
            stage = find_stage_outside_program(text or b"", threads)
            self._found[rank] = replace(
                inspected, condition=condition, threads=threads, no_stack=why_not, outside=stage
            )

    # ------------------------------------------------------------------------------------ workers, the other reads, end

    def _start_workers(self, awaiting: frozenset[int], now: Now) -> None:
        self._take_step(InspectionStep.DUMP_WORKERS)
        for rank, found in self._found.items():
            if rank in awaiting and (words := describe_noncollective_wait(found)) in WAITS_FOR_CHILDREN:
                self._do(StartWorkerDumps(rank, words == DATALOADER_WAIT_TEXT))
        self._set_phase_deadline(dataloader_workers.TOTAL_TIMEOUT_S, now)
        self._do(Poll())

    def _on_workers(self, workers: Mapping[int, tuple[Worker, ...]], now: Now) -> None:
        for rank, found in workers.items():
            self._found[rank] = replace(self._found[rank], workers=found)
        any_state = any(found.groups or found.inside for found in self._found.values())
        if self._detail is not Detail.WAITS or not any_state:
            return self._end(now)
        self._take_step(InspectionStep.PAUSE)
        self._recheck_at = max(now.mono, min(self._began + RECHECK_INTERVAL_S, self._deadline))

    def _read_details(self, now: Now) -> None:
        """Request the last collectives of the ranks that decide who waits for whom; of more ranks where needed."""
        wanted = ranks_to_query(self._build_inspection(now))
        if wanted and self._round < _MAX_ROUNDS:
            self._read(now, wanted)
        else:
            self._end(now)

    def _end(self, now: Now) -> None:
        self._take_step(InspectionStep.END)
        self._set_phase_deadline(EXIT_STATUS_TIMEOUT_S, now)
        self._do(ReadStates())

    def _on_states(self, states: StatesRead, now: Now) -> None:
        """Finish once the exit codes of all ranks that have ended are known."""
        for rank, state in states.ended.items():
            self._found[rank] = replace(
                self._found[rank], condition=ProcessCondition.EXITED, code=state.code, ended=state.ended
            )
        if states.awaited and now.mono < self._part_deadline:
            return self._do(ReadStates(later=True))
        self._take_step(InspectionStep.FINISH)
        self._do(FinishInspection(self._build_inspection(now)))

    def _build_inspection(self, now: Now) -> Inspection:
        return Inspection(now.wall, tuple(self._found[rank] for rank in sorted(self._found)), self._world_size)
