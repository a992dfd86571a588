"""The status of a job as one node has it: one frozen snapshot, folded from the events; nothing else writes it."""

from __future__ import annotations

import re
from enum import Enum

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.errors import shown
from ddplaunch.job.effective import Spent
from ddplaunch.output import events
from ddplaunch.output.events import Event
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, EndCode, ExitCode, Line, Moment, Ordinal, Pid, RunId

MAX_TARGET = 1000  # characters of the target that are shown

_CALLED = re.compile(r"python \S*\bddplaunch-[^/]+/launch\.py:(\w+)( .*)?")


def short_target(target: str) -> str:
    """A target for a table: without "python", and of a call from Python the function's name."""
    if called := _CALLED.fullmatch(target):
        return f"{called[1]}()"
    return target.removeprefix("python ")


class State(Enum):
    """Where this node's share of the job stands."""

    JOINING = "joining"  # nothing has started: other nodes are awaited
    STARTING = "starting"  # some ranks have no process yet
    RUNNING = "running"  # every rank has been started
    PREEMPTED = "preempted"  # the scheduler wants the machines back, and the ranks know
    STOPPING = "stopping"  # after a signal, or after the failure of a rank here
    SWEPT = "swept"  # nothing of the attempt is left here
    RESTARTING = "restarting"  # the next attempt has been announced
    ENDED = "ended"


NEXT = {
    State.JOINING: {State.STARTING, State.STOPPING, State.ENDED},
    State.STARTING: {State.RUNNING, State.PREEMPTED, State.STOPPING, State.SWEPT, State.ENDED},
    State.RUNNING: {State.PREEMPTED, State.STOPPING, State.SWEPT, State.ENDED},
    # A signal may be the scheduler's warning, and come while node 0's order to start is on its way.
    State.PREEMPTED: {State.STOPPING, State.STARTING, State.SWEPT, State.ENDED},
    State.STOPPING: {State.PREEMPTED, State.STARTING, State.SWEPT, State.RESTARTING, State.ENDED},
    State.SWEPT: {State.STARTING, State.STOPPING, State.RESTARTING, State.ENDED},
    State.RESTARTING: {State.STARTING, State.STOPPING, State.ENDED},
    State.ENDED: set[State](),
}


class RankState(Enum):
    """Where one rank stands."""

    PENDING = "pending"  # it has no process yet
    UNABLE = "unable"  # the system refused it a process
    RUNNING = "running"
    EXITED = "exited"


NEXT_OF_RANK = {
    RankState.PENDING: {RankState.RUNNING, RankState.UNABLE},
    RankState.UNABLE: set[RankState](),
    RankState.RUNNING: {RankState.EXITED},
    RankState.EXITED: {RankState.EXITED},  # swept before its end was seen
}


@dataclass(frozen=True)
class RankStatus:
    """One rank of this node."""

    rank: Count
    pid: Pid = 0  # before it has a process
    state: RankState = RankState.PENDING
    code: EndCode | None = None  # -N for signal N; None where it is not known

    def to(self, state: RankState, *, pid: int = 0, code: int | None = None) -> RankStatus:
        """The same rank in its next state; unchanged where that cannot follow."""
        if state not in NEXT_OF_RANK[self.state]:
            return self
        return replace(self, state=state, pid=pid or self.pid, code=code)


@dataclass(frozen=True)
class Status:
    """This node's share of a job; times in seconds since the epoch."""

    run_id: RunId
    target: Line  # what was typed, on one line
    pid: Pid  # the launcher's
    node_rank: Count
    world_size: Count
    began: Moment  # when the launcher did
    since: Moment  # when ``state`` did
    attempt: Ordinal = -1  # 0 is the first, -1 none yet
    state: State = State.JOINING
    ranks: tuple[RankStatus, ...] = ()  # those of this node, in order
    restarts: Count = 0  # how many were announced
    code: ExitCode | None = None  # the exit code, once it is known
    spent: Spent = Spent()  # where the time went until now

    @classmethod
    def of(cls, plan: Plan, pid: int, began: float) -> Status:
        """The status before anything has happened; ``plan`` is this node's, before it has joined the others."""
        target = shown(" ".join(plan.target.argv), MAX_TARGET)
        return cls(plan.run_id, target, pid, plan.node_rank, plan.world_size, began=began, since=began)

    def after(self, event: Event, now: float) -> Status:
        """The status once ``event`` has happened at ``now``, seconds since the epoch."""
        if self.state is State.ENDED:
            return self
        match event:
            case events.Planned(plan=plan, attempt=attempt):
                return replace(
                    self._to(State.STARTING, now),
                    run_id=plan.run_id,
                    node_rank=plan.node_rank,
                    world_size=plan.world_size,
                    attempt=attempt,
                    ranks=tuple(RankStatus(rank.rank) for rank in plan.local_ranks),
                )
            case events.Started(rank=rank, pid=pid):
                started = self._rank(rank, RankState.RUNNING, pid=pid)
                all_have = all(each.state is not RankState.PENDING for each in reversed(started.ranks))
                return started._to(State.RUNNING, now) if all_have and self.state is State.STARTING else started
            case events.FailedToStart(rank=rank):
                return self._rank(rank, RankState.UNABLE)._stopping(now)
            case events.Exited(rank=rank, code=code) if event.attempt == self.attempt:
                ended = self._rank(rank, RankState.EXITED, code=code)
                index = self._index(rank)
                failed = code and index is not None and self.ranks[index].state is RankState.RUNNING
                return ended._stopping(now) if failed else ended
            case events.Signalled():
                return self._to(State.STOPPING, now)
            case events.Preempted() if State.PREEMPTED in NEXT[self.state]:
                return self._to(State.PREEMPTED, now)
            case events.Swept() if State.SWEPT in NEXT[self.state]:  # where the zygote was lost, nobody saw their end
                ranks = tuple(each.to(RankState.EXITED, code=each.code) for each in self.ranks)
                return replace(self._to(State.SWEPT, now), ranks=ranks)
            case events.Restarting() if State.RESTARTING in NEXT[self.state]:
                return replace(self._to(State.RESTARTING, now), restarts=self.restarts + 1)
            case events.Ended(code=code):
                return replace(self._to(State.ENDED, now), code=code)
        return self

    def _stopping(self, now: float) -> Status:
        """A rank has failed: the others are stopped, if none was told to make room."""
        return self._to(State.STOPPING, now) if self.state in (State.STARTING, State.RUNNING) else self

    def _to(self, state: State, now: float) -> Status:
        if state is self.state:
            return self
        assert state in NEXT[self.state], f"{self.state} to {state}"
        return replace(self, state=state, since=now)

    def _rank(self, number: int, state: RankState, *, pid: int = 0, code: int | None = None) -> Status:
        index = self._index(number)
        if index is None:
            return self
        moved = self.ranks[index].to(state, pid=pid, code=code)
        return replace(self, ranks=(*self.ranks[:index], moved, *self.ranks[index + 1 :]))

    def _index(self, number: int) -> int | None:
        """Where that rank is; the ranks of a node follow one another."""
        index = number - self.ranks[0].rank if self.ranks else -1
        return index if 0 <= index < len(self.ranks) else None
