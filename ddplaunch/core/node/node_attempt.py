"""The data of an attempt on one node: its phase and the state of its ranks. Only ``NodeMachine`` changes it.

The runner and features read it as an ``AttemptView``.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from msgspec import Struct, field

from ddplaunch.core.deadlines import Deadline, Deadlines
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.machine import Transitions, next_phase
from ddplaunch.core.messages import LauncherFailure
from ddplaunch.system.plan.rank_layout import Rank


class AttemptPhase(Enum):
    """The phase of an attempt on this node."""

    WAITING = "idle, waiting for the coordinator"
    LOADING = "ranks are requested, and the zygote is importing"
    RUNNING = "ranks are running"
    STOPPING = "ranks have got a signal to stop"
    SWEEPING = "leftover processes are being killed"
    DRAINING = "the last output is being read"
    ENDED = "the job is over"


class AttemptStep(Enum):
    """A step of an attempt on a node: what ``NodeMachine`` may do next."""

    LOAD = "wait for the zygote's imports"
    RUN = "request the ranks from the zygote"
    STOP = "send the ranks a signal to end"
    SWEEP = "have the zygote kill what is left"
    DRAIN = "read the last output: no process is left"
    REPORT = "send the AttemptReport"
    END = "end the job on this node"


ATTEMPT_TRANSITIONS: Transitions[AttemptPhase, AttemptStep] = {
    AttemptPhase.WAITING: {
        AttemptStep.LOAD: AttemptPhase.LOADING,
        AttemptStep.RUN: AttemptPhase.RUNNING,
        AttemptStep.END: AttemptPhase.ENDED,
    },
    AttemptPhase.LOADING: {
        AttemptStep.RUN: AttemptPhase.RUNNING,
        AttemptStep.DRAIN: AttemptPhase.DRAINING,
    },
    AttemptPhase.RUNNING: {
        AttemptStep.STOP: AttemptPhase.STOPPING,
        AttemptStep.SWEEP: AttemptPhase.SWEEPING,
        AttemptStep.DRAIN: AttemptPhase.DRAINING,  # the zygote was lost
    },
    AttemptPhase.STOPPING: {
        AttemptStep.STOP: AttemptPhase.STOPPING,  # with another signal
        AttemptStep.SWEEP: AttemptPhase.SWEEPING,
        AttemptStep.DRAIN: AttemptPhase.DRAINING,
    },
    AttemptPhase.SWEEPING: {
        AttemptStep.DRAIN: AttemptPhase.DRAINING,
    },
    AttemptPhase.DRAINING: {
        AttemptStep.REPORT: AttemptPhase.WAITING,
        AttemptStep.END: AttemptPhase.ENDED,
    },
    AttemptPhase.ENDED: {},
}

RUNNING_PHASES = (AttemptPhase.RUNNING, AttemptPhase.STOPPING)


class LiveRank(Struct):
    """A rank with a process; ``stop_requested``: the launcher has sent it a signal to end, or is about to kill it."""

    pid: int
    stop_requested: bool = False


class GraceOver(Deadline, frozen=True):
    """Kill the ranks."""


class SigtermDue(Deadline, frozen=True):
    """Send SIGTERM to the ranks, which got SIGINT before."""


class StopOrderLate(Deadline, frozen=True):
    """Node 0 has not ordered the stop that this node requested."""

    number: int


class SweepLate(Deadline, frozen=True):
    """The zygote has not reported the end of its descendants: it is stopped itself, or blocked in the kernel."""


class DrainLate(Deadline, frozen=True):
    """A process that left the ranks' sessions keeps their output open."""


class ForwardRequestDue(Deadline, frozen=True):
    """Ask node 0 to have a signal forwarded; ``since`` makes each arrival a deadline of its own."""

    number: int
    since: float


class ForwardDue(Deadline, frozen=True):
    """Forward a signal to the ranks, on the order of node 0."""

    number: int
    since: float


class PreemptSignalDue(Deadline, frozen=True):
    """Forward the signal of the preemption to the ranks of this attempt."""

    number: int
    only_handlers: bool
    attempt: int


class NodeAttempt(Struct):
    """One attempt, from the order to start it until its report; number -1: none has begun."""

    number: int = -1
    phase: AttemptPhase = AttemptPhase.WAITING
    ranks: dict[int, Rank] = field(default_factory=dict)  # of this node, by rank
    pending: deque[int] = field(default_factory=deque)  # ranks that are not requested from the zygote yet
    in_flight: set[int] = field(default_factory=set)  # requested, without a process yet
    live: dict[int, LiveRank] = field(default_factory=dict)
    spawned_count: int = 0  # how many have had a process
    explaining: set[int] = field(default_factory=set)  # ranks that have ended; the runner finds out why
    failures: list[RankFailure] = field(default_factory=list)  # not those of ranks that were stopped
    stopped_count: int = 0  # how many have ended because of a stop signal
    stop_signals: set[int] = field(default_factory=set)  # sent to the ranks so far
    launcher_failure: LauncherFailure | None = None
    unkillable: tuple[str, ...] | None = None  # once the zygote is lost: processes that cannot be killed
    deadlines: Deadlines[Deadline] = field(default_factory=Deadlines)  # cancelled once no process is left

    def take_step(self, step: AttemptStep) -> None:
        self.phase = next_phase(ATTEMPT_TRANSITIONS, self.phase, step)

    @property
    def not_spawned(self) -> int:
        """How many ranks are to start, and have no process yet."""
        return len(self.pending) + len(self.in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no rank runs, none is to start, and the end of each is explained."""
        return not (self.pending or self.in_flight or self.live or self.explaining)

    def set_launcher_failure(self, how: str, moment: float) -> None:
        """Record that the zygote or the store has ended, on which the ranks depend."""
        self.launcher_failure = self.launcher_failure or LauncherFailure(how, moment)

    def make_failure(self, rank: int, pid: int, code: int, moment: float, message: str | None = None) -> RankFailure:
        """Build the ``RankFailure`` of a rank from its exit code alone; ``code``: exit code, -N for signal N."""
        return RankFailure(
            rank=rank,
            local_rank=self.ranks[rank].local_rank,
            host=self.ranks[rank].host or "",
            pid=pid,
            attempt=self.number,
            exit_code=None if code < 0 else code,
            signal=-code if code < 0 else None,
            message=message,
            traceback=None,
            moment=moment,
            hint=None,
        )


class AttemptView:
    """A read-only view of an attempt, for code outside ``NodeMachine``; it always shows the current state."""

    def __init__(self, attempt: NodeAttempt) -> None:
        self._attempt = attempt

    @property
    def number(self) -> int:
        """The number of the attempt: 0 for the first, -1 if none has begun."""
        return self._attempt.number

    @property
    def phase(self) -> AttemptPhase:
        return self._attempt.phase

    @property
    def not_spawned(self) -> int:
        """How many ranks are to start, and have no process yet."""
        return self._attempt.not_spawned

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """The failures of ranks in this attempt, without ranks that were stopped."""
        return tuple(self._attempt.failures)

    def is_stop_requested(self, rank: int) -> bool:
        """Whether the launcher has sent a live rank a signal to end."""
        return rank in self._attempt.live and self._attempt.live[rank].stop_requested
