"""The status of a job as known on one node: a frozen snapshot, built from the events only, and its tracker."""

from __future__ import annotations

import os
import time
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import (
    AttemptNumber,
    Count,
    ExitCode,
    ExitStatus,
    NonNegativeFloat,
    Pid,
    RunId,
    Size,
    TaggedMessage,
    TextLine,
    Timestamp,
)
from ddplaunch.core import events
from ddplaunch.core.events import Event
from ddplaunch.system.history_dir import MAX_TARGET_CHARS
from ddplaunch.system.plan.plan import Plan

MAX_PENDING_EVENTS = 4096  # of the tracker, before they are applied


class JobState(Enum):
    """The state of this node's part of the job."""

    JOINING = "joining"  # nothing has started: waiting for other nodes
    STARTING = "starting"  # some ranks have no process yet, or wait for other programs of the job
    RUNNING = "running"  # every rank has been started; on a node without ranks, every program is ready
    PREEMPTED = "preempted"  # the scheduler takes the machines back, and the ranks were notified
    STOPPING = "stopping"  # after a signal, or after the failure of a rank here
    SWEPT = "ending"  # all processes of the attempt have ended here
    RESTARTING = "restarting"  # the next attempt has been announced
    ENDED = "ended"


JOB_STATE_TRANSITIONS = {
    JobState.JOINING: {JobState.STARTING, JobState.STOPPING, JobState.ENDED},
    JobState.STARTING: {
        JobState.RUNNING,
        JobState.PREEMPTED,
        JobState.STOPPING,
        JobState.SWEPT,
        JobState.RESTARTING,
        JobState.ENDED,
    },
    # A node without ranks has nothing to sweep before a restart.
    JobState.RUNNING: {JobState.PREEMPTED, JobState.STOPPING, JobState.SWEPT, JobState.RESTARTING, JobState.ENDED},
    # A signal may be the preemption notice, and come while node 0's order to start is on its way.
    JobState.PREEMPTED: {JobState.STOPPING, JobState.STARTING, JobState.SWEPT, JobState.ENDED},
    JobState.STOPPING: {JobState.PREEMPTED, JobState.STARTING, JobState.SWEPT, JobState.RESTARTING, JobState.ENDED},
    JobState.SWEPT: {JobState.STARTING, JobState.STOPPING, JobState.RESTARTING, JobState.ENDED},
    JobState.RESTARTING: {JobState.STARTING, JobState.STOPPING, JobState.ENDED},
    JobState.ENDED: set[JobState](),
}


class RankState(Enum):
    """The state of one rank."""

    PENDING = "pending"  # it has no process yet
    UNABLE = "unable"  # the system could not start its process
    RUNNING = "running"
    EXITED = "exited"


RANK_STATE_TRANSITIONS = {
    RankState.PENDING: {RankState.RUNNING, RankState.UNABLE},
    RankState.UNABLE: set[RankState](),
    RankState.RUNNING: {RankState.EXITED},
    RankState.EXITED: {RankState.EXITED},  # swept before its end was seen
}


class RankStatus(Struct, frozen=True):
    """One rank of this node."""

    rank: Count
    pid: Pid = 0  # before it has a process
    state: RankState = RankState.PENDING
    code: ExitStatus | None = None  # -N for signal N; None where unknown

    def with_state(self, state: RankState, *, pid: int = 0, code: int | None = None) -> RankStatus:
        """Return the rank in its next state; unchanged if that transition is not allowed."""
        if state not in RANK_STATE_TRANSITIONS[self.state]:
            return self
        return replace(self, state=state, pid=pid or self.pid, code=code)


class ProgramStatus(Struct, frozen=True):
    """One program beside the ranks of this node; times in seconds since the epoch."""

    program: TextLine  # its name
    kind: TextLine
    gpus: TextLine  # "0-3"; "" for none
    address: TextLine  # "" without a port
    since: Timestamp  # when ``state`` began
    state: TextLine = "waiting"  # "starting", "ready", "ended"
    pid: Pid = 0  # before it has a process
    code: ExitStatus | None = None  # -N for signal N
    ready_after_s: NonNegativeFloat | None = None  # since it has its process
    starts: Count = 0
    peak_memory: Size = 0  # bytes, of all starts that have ended; 0 where unknown
    quiet: NonNegativeFloat | None = None  # seconds from its last output to its end

    @property
    def is_running(self) -> bool:
        return bool(self.pid) and self.code is None

    @property
    def place(self) -> str:
        """The GPUs and the address of the program: "GPUs 0-3, 127.0.0.1:8000"."""
        return ", ".join(filter(None, (f"GPUs {self.gpus}" if self.gpus else "", self.address)))

    def with_new_start(self, now: float) -> ProgramStatus:
        """Return the status as an attempt starts: a program that has ended starts again, unless it is a sidecar."""
        return self if self.state != "ended" or self.kind == "sidecar" else replace(self, state="waiting", since=now)

    def has_gpu(self, index: int) -> bool:
        """Whether the program has the GPU with this index."""
        runs = ((first, last or first) for first, _, last in (each.partition("-") for each in self.gpus.split(",")))
        return any(int(first) <= index <= int(last) for first, last in runs if (first + last).isdecimal())


def apply_event_to_programs(programs: tuple[ProgramStatus, ...], event: Event, now: float) -> tuple[ProgramStatus, ...]:
    """Return the programs after an event, which happened at ``now``."""
    changes: dict[str, object]
    match event:
        case events.ProgramPlanned():
            planned = ProgramStatus(event.program, event.kind, event.gpus, event.address, now)
            return (*(each for each in programs if each.program != event.program), planned)
        case events.ProgramStarted():
            starts = next((each.starts for each in programs if each.program == event.program), 0) + 1
            changes = {"state": "starting", "pid": event.pid, "code": None, "ready_after_s": None, "starts": starts}
        case events.ProgramReady():
            changes = {"state": "ready", "ready_after_s": event.seconds}
        case events.ProgramExited():
            peak = next((each.peak_memory for each in programs if each.program == event.program), 0)
            changes = {"state": "ended", "code": event.code, "quiet": event.quiet}
            changes["peak_memory"] = max(peak, event.peak_memory)
        case _:
            return programs
    return tuple(replace(each, since=now, **changes) if each.program == event.program else each for each in programs)


class Status(TaggedMessage, frozen=True):
    """The status of this node's part of a job; times in seconds since the epoch."""

    run_id: RunId
    target: TextLine  # the script or program and its arguments, on one line
    pid: Pid  # the launcher's
    node_rank: Count
    world_size: Count
    began: Timestamp  # when the launcher started
    since: Timestamp  # when ``state`` began
    attempt: AttemptNumber = -1  # 0 is the first, -1 none yet
    state: JobState = JobState.JOINING
    ranks: tuple[RankStatus, ...] = ()  # those of this node, in order
    restarts: Count = 0  # announced so far
    code: ExitCode | None = None  # the exit code, once it is known
    programs: tuple[ProgramStatus, ...] = ()  # beside the ranks, of this node
    has_ranks: bool = True  # False where other programs of the job run, and never ranks

    @classmethod
    def from_plan(cls, plan: Plan, pid: int, began: float) -> Status:
        """Return the status before any event; ``plan`` is this node's, before it has joined the others."""
        target = sanitize_line(" ".join(plan.target.argv), MAX_TARGET_CHARS)
        return cls(plan.run_id, target, pid, plan.node_rank, plan.world_size, began=began, since=began)

    def apply(self, event: Event, now: float) -> Status:
        """Return the status after ``event``, which happened at ``now`` in seconds since the epoch."""
        if self.state is JobState.ENDED:
            return self
        match event:
            case events.AttemptPlanned(plan=plan, attempt=attempt):
                return replace(
                    self._with_state(JobState.STARTING, now),
                    run_id=plan.run_id,
                    node_rank=plan.node_rank,
                    world_size=plan.world_size,
                    attempt=attempt,
                    ranks=tuple(RankStatus(rank.rank) for rank in plan.local_ranks),
                )
            case events.RankStarted(rank=rank, pid=pid):
                started = self._with_rank(rank, RankState.RUNNING, pid=pid)
                all_started = all(each.state is not RankState.PENDING for each in reversed(started.ranks))
                return (
                    started._with_state(JobState.RUNNING, now)
                    if all_started and self.state is JobState.STARTING
                    else started
                )
            case events.RankStartFailed(rank=rank):
                return self._with_rank(rank, RankState.UNABLE)._to_stopping(now)
            case events.RankExited(rank=rank, code=code) if event.attempt == self.attempt:
                ended = self._with_rank(rank, RankState.EXITED, code=code)
                index = self._rank_index(rank)
                failed = code and index is not None and self.ranks[index].state is RankState.RUNNING
                return ended._to_stopping(now) if failed else ended
            case events.SignalReceived():
                return self._with_state(JobState.STOPPING, now)
            case events.JobPreempted() if JobState.PREEMPTED in JOB_STATE_TRANSITIONS[self.state]:
                return self._with_state(JobState.PREEMPTED, now)
            case events.AttemptSwept() if JobState.SWEPT in JOB_STATE_TRANSITIONS[self.state]:
                # After the loss of the zygote the end of ranks was not seen.
                ranks = tuple(each.with_state(RankState.EXITED, code=each.code) for each in self.ranks)
                return replace(self._with_state(JobState.SWEPT, now), ranks=ranks)
            case events.Restarting() if JobState.RESTARTING in JOB_STATE_TRANSITIONS[self.state]:
                return replace(self._with_state(JobState.RESTARTING, now), restarts=self.restarts + 1)
            case events.JobEnded(code=code):
                return replace(self._with_state(JobState.ENDED, now), code=code)
            case events.ProgramsStarting(has_ranks=has_ranks) if JobState.STARTING in JOB_STATE_TRANSITIONS[self.state]:
                programs = tuple(each.with_new_start(now) for each in self.programs)
                return replace(self._with_state(JobState.STARTING, now), has_ranks=has_ranks, programs=programs)
        programs = apply_event_to_programs(self.programs, event, now)
        return self if programs is self.programs else replace(self, programs=programs)._to_running_without_ranks(now)

    def _to_running_without_ranks(self, now: float) -> Status:
        """Return the status; if this node has no ranks and all its programs are ready, the state is RUNNING."""
        are_ready = all(each.state in ("ready", "ended") for each in self.programs)
        is_due = self.state is JobState.STARTING and not self.has_ranks and are_ready
        return self._with_state(JobState.RUNNING, now) if is_due else self

    def _to_stopping(self, now: float) -> Status:
        """Return the status after a rank has failed: the others are being stopped; a preempted job stays PREEMPTED."""
        return self._with_state(JobState.STOPPING, now) if self.state in (JobState.STARTING, JobState.RUNNING) else self

    def _with_state(self, state: JobState, now: float) -> Status:
        if state is self.state:
            return self
        assert state in JOB_STATE_TRANSITIONS[self.state], f"{self.state} to {state}"
        return replace(self, state=state, since=now)

    def _with_rank(self, number: int, state: RankState, *, pid: int = 0, code: int | None = None) -> Status:
        index = self._rank_index(number)
        if index is None:
            return self
        moved = self.ranks[index].with_state(state, pid=pid, code=code)
        return replace(self, ranks=(*self.ranks[:index], moved, *self.ranks[index + 1 :]))

    def _rank_index(self, number: int) -> int | None:
        """Return the rank's index in ``ranks``; the ranks of a node follow one another."""
        index = number - self.ranks[0].rank if self.ranks else -1
        return index if 0 <= index < len(self.ranks) else None


class StatusTracker:
    """The observer that tracks the status of this node's part of a job. Reading the status applies the events."""

    def __init__(self, plan: Plan) -> None:
        """``plan`` is this node's, before it has joined the others."""
        self._status = Status.from_plan(plan, os.getpid(), time.time())
        self._pending: list[tuple[Event, float]] = []

    def observe(self, event: Event) -> None:
        self._pending.append((event, time.time()))
        if len(self._pending) > MAX_PENDING_EVENTS:
            self.status()

    def status(self) -> Status:
        for event, moment in self._pending:
            self._status = self._status.apply(event, moment)
        self._pending.clear()
        return self._status
