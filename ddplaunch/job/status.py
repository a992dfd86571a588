"""The status of a job as one node has it: one frozen snapshot, folded from the events; nothing else writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from ddplaunch.errors import shown
from ddplaunch.output import events
from ddplaunch.output.events import Event
from ddplaunch.plan.plan import Plan

MAX_TARGET = 1000
"""Characters of the target that are shown."""


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
    FINISHED = "finished"  # its program has ended well; its process keeps the store for the others
    EXITED = "exited"


NEXT_OF_RANK = {
    RankState.PENDING: {RankState.RUNNING, RankState.UNABLE},
    RankState.UNABLE: set[RankState](),
    RankState.RUNNING: {RankState.FINISHED, RankState.EXITED},
    RankState.FINISHED: {RankState.EXITED},
    RankState.EXITED: set[RankState](),
}


@dataclass(frozen=True)
class RankStatus:
    """One rank; ``pid`` is 0 before it has a process, ``code`` -N for signal N and None where it is not known."""

    rank: int
    pid: int = 0
    state: RankState = RankState.PENDING
    code: int | None = None

    def to(self, state: RankState, *, pid: int | None = None, code: int | None = None) -> RankStatus:
        """The same rank in its next state."""
        assert state in NEXT_OF_RANK[self.state], f"{self.state} to {state}"
        return replace(self, state=state, pid=self.pid if pid is None else pid, code=code)


@dataclass(frozen=True)
class Status:
    """This node's share of a job; times in seconds since the epoch.

    Attributes:
        target: what was typed, on one line. pid: the launcher's.
        attempt: 0 is the first, -1 none yet. restarts: how many were announced.
        ranks: those of this node, in order.
        began: when the launcher did; since: when ``state`` did.
        code: the exit code, once it is known.
    """

    run_id: str
    target: str
    pid: int
    node_rank: int
    world_size: int
    began: float
    since: float
    attempt: int = -1
    state: State = State.JOINING
    ranks: tuple[RankStatus, ...] = ()
    restarts: int = 0
    code: int | None = None

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
                started = self._rank(rank, {RankState.PENDING}, RankState.RUNNING, pid=pid)
                all_have = all(each.state is not RankState.PENDING for each in reversed(started.ranks))
                return started._to(State.RUNNING, now) if all_have and self.state is State.STARTING else started
            case events.FailedToStart(rank=rank):
                return self._rank(rank, {RankState.PENDING}, RankState.UNABLE)._stopping(now)
            case events.Finished(rank=rank):
                return self._rank(rank, {RankState.RUNNING}, RankState.FINISHED)
            case events.Exited():
                return self._exited(event, now)
            case events.Signalled():
                return self._to(State.STOPPING, now)
            case events.Preempted() if self.state in (State.STARTING, State.RUNNING, State.STOPPING):
                return self._to(State.PREEMPTED, now)
            case events.Swept() if self.state not in (State.JOINING, State.RESTARTING):
                left = (RankState.RUNNING, RankState.FINISHED)  # their zygote was lost, and nobody saw their end
                ranks = tuple(each.to(RankState.EXITED) if each.state in left else each for each in self.ranks)
                return replace(self._to(State.SWEPT, now), ranks=ranks)
            case events.Restarting() if self.state in (State.SWEPT, State.STOPPING):
                return replace(self._to(State.RESTARTING, now), restarts=self.restarts + 1)
            case events.Ended(code=code):
                return replace(self._to(State.ENDED, now), code=code)
        return self

    def _exited(self, event: events.Exited, now: float) -> Status:
        if event.attempt != self.attempt:
            return self
        if (index := self._index(event.rank)) is None:
            return self
        old = self.ranks[index].state
        if old is RankState.EXITED:  # swept before its end was seen
            return self._replace(event.rank, lambda rank: replace(rank, code=event.code))
        ended = self._rank(event.rank, {RankState.RUNNING, RankState.FINISHED}, RankState.EXITED, code=event.code)
        return ended._stopping(now) if event.code and old is RankState.RUNNING else ended

    def _stopping(self, now: float) -> Status:
        """A rank has failed: the others are stopped, if none was told to make room."""
        return self._to(State.STOPPING, now) if self.state in (State.STARTING, State.RUNNING) else self

    def _to(self, state: State, now: float) -> Status:
        if state is self.state:
            return self
        assert state in NEXT[self.state], f"{self.state} to {state}"
        return replace(self, state=state, since=now)

    def _rank(
        self, number: int, at: set[RankState], state: RankState, *, pid: int | None = None, code: int | None = None
    ) -> Status:
        """Move one rank on, where it is ``at`` one of these states."""
        return self._replace(number, lambda rank: rank.to(state, pid=pid, code=code) if rank.state in at else rank)

    def _replace(self, number: int, change: Callable[[RankStatus], RankStatus]) -> Status:
        index = self._index(number)
        if index is None:
            return self
        return replace(self, ranks=(*self.ranks[:index], change(self.ranks[index]), *self.ranks[index + 1 :]))

    def _index(self, number: int) -> int | None:
        """Where that rank is; the ranks of a node follow one another."""
        index = number - self.ranks[0].rank if self.ranks else -1
        return index if 0 <= index < len(self.ranks) else None
