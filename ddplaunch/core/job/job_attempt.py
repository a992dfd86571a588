"""The phases of a job, and the state of one attempt on all nodes: failures, lost nodes, and which nodes still run."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.core.clock_offset import to_local_time
from ddplaunch.core.failures import (
    MAX_REPORT_CHARS,
    FailureReport,
    JobResult,
    RankFailure,
    find_first_cause,
    limit_failure_texts,
)
from ddplaunch.core.job.node_table import JoinedNode
from ddplaunch.core.machine import Transitions
from ddplaunch.core.messages import AttemptReport

SECONDARY_FAILURE_DELAY_S = 1.0  # after a lost connection, wait for the peer's own failure before stopping
PROGRAM_FAILURE_DELAY_S = 5.0  # the same for the end of a server: vLLM takes seconds to end once its engine is gone
MAX_FAILURE_CHARS = 16 << 20  # of the texts of all failures of an attempt; later ones are cut to one line


class JobPhase(Enum):
    """The phase of the whole job."""

    JOINING = "waiting for nodes"
    CHECKING = "every node checks its machine"
    RUNNING = "the ranks run"
    STOPPING = "the ranks are being stopped"
    PAUSING = "no ranks; waiting for the restart"
    ENDED = "the job has ended"


class JobStep(Enum):
    """A step of the job machine: what it may do next."""

    CHECK = "have every node check itself"
    START = "start the ranks on all nodes"
    STOP = "stop the ranks"
    PAUSE = "wait for the restart, with no rank left"
    END = "end the job"


JOB_TRANSITIONS: Transitions[JobPhase, JobStep] = {
    JobPhase.JOINING: {
        JobStep.CHECK: JobPhase.CHECKING,
        JobStep.START: JobPhase.RUNNING,
        JobStep.END: JobPhase.ENDED,
    },
    JobPhase.CHECKING: {
        JobStep.START: JobPhase.RUNNING,
        JobStep.END: JobPhase.ENDED,
    },
    JobPhase.RUNNING: {
        JobStep.STOP: JobPhase.STOPPING,
        JobStep.PAUSE: JobPhase.PAUSING,
        JobStep.END: JobPhase.ENDED,
    },
    JobPhase.STOPPING: {
        JobStep.STOP: JobPhase.STOPPING,  # with another signal, or without grace
        JobStep.PAUSE: JobPhase.PAUSING,
        JobStep.END: JobPhase.ENDED,
    },
    JobPhase.PAUSING: {
        JobStep.CHECK: JobPhase.CHECKING,
        JobStep.START: JobPhase.RUNNING,
        JobStep.END: JobPhase.ENDED,
    },
    JobPhase.ENDED: {},
}

PHASES_WITHOUT_RANKS = {JobPhase.JOINING, JobPhase.CHECKING, JobPhase.PAUSING}
PHASES_WITH_RANKS = {JobPhase.RUNNING, JobPhase.STOPPING}


class NodeFailure(Struct, frozen=True):
    """A node with ranks that was lost or has left, or whose launcher lost a process of its own, like the zygote."""

    time: float
    node: int  # its node rank as given on its command line
    host: str
    reason: str
    left: bool = False  # it left after a SIGTERM, which its ranks may have got earlier than the launcher

    def happened_before(self, verdict: FailureReport | None) -> bool:
        """Whether this failure of a node is the cause of the ranks' failures, and not their result."""
        if verdict is None or verdict.first.is_secondary:
            return True
        unsure = self.left if verdict.first.host == self.host else verdict.first.message is not None
        return verdict.first.moment > self.time - (SECONDARY_FAILURE_DELAY_S if unsure else 0.0)


class StopCause(Struct, frozen=True):
    """Why an attempt is stopped although no rank has failed: a time limit, or the failure of another program."""

    reason: str  # for the message
    failure: RankFailure | None  # of the rank that the others waited for; None if unknown
    rank_was_alive: bool = False  # whether that rank's process had not ended
    may_restart: bool = False
    code: int = EXIT_TIMEOUT  # the exit code of the job
    of_program: bool = False  # whether it is the failure of another program of the job
    details: str = ""  # more lines for the user

    def result(self, activity: str = "") -> JobResult:
        """Return the result of the job; ``activity``: what the ranks were doing, or ""."""
        if not self.of_program:
            return JobResult(self.code, remark=": ".join(filter(None, (self.reason, activity))))
        lines = (f"{self.reason} (exit code {self.code})", self.details, activity and f"  meanwhile: {activity}")
        return JobResult(self.code, remark="\n".join(filter(None, lines)))


class JobAttempt(Struct):
    """One attempt: one start of all ranks, on all nodes."""

    number: int = -1  # 0 is the first, -1 none yet
    world_size: int = 0
    started_at: float = 0.0  # monotonic
    running_nodes: set[int] = field(default_factory=set)  # nodes whose ranks have not all finished
    unreported_nodes: set[int] = field(default_factory=set)  # nodes without an AttemptReport: ranks may be left there
    failures: dict[int, RankFailure] = field(default_factory=dict)  # by rank
    lost_nodes: list[NodeFailure] = field(default_factory=list)
    stopped_ranks: int = 0  # number of ranks that were stopped
    launcher_failure: NodeFailure | None = None  # the earliest, of all nodes
    stopping_to_change_nodes: bool = False  # it is being stopped to add a node, or because one leaves
    asked_sides: set[str] = field(default_factory=set)  # features whose request before the stop was sent
    sides_to_reply: set[str] = field(default_factory=set)  # those that the stop of the ranks waits for
    stops_after_replies: list[tuple[int, float | None]] = field(default_factory=list)  # signals with their graces
    stop_cause: StopCause | None = None  # that stopped the attempt
    awaits_program: bool = False  # a rank may have failed because of another program, whose end is not known yet
    was_reported_early: bool = False  # whether the cause was printed before all ranks had ended
    is_over: bool = False  # whether its end was announced
    failure_chars: int = 0  # in the texts of all failures

    def remove_node(self, node: int) -> None:
        """Called when all ranks of this node have ended, or the node is lost. (With lists, N nodes would cost N².)"""
        self.running_nodes.discard(node)
        self.unreported_nodes.discard(node)

    def add_leaving_node(self, node: JoinedNode, now: float) -> None:
        """Record that a node with ranks leaves the job."""
        self.lost_nodes.append(NodeFailure(now, node.node_rank, node.host, node.leave_note, left=True))
        self.stopping_to_change_nodes = True

    def add_failure(self, failure: RankFailure, clock: float, now: float) -> None:
        """Add a failure, with its full texts until MAX_FAILURE_CHARS is reached; ``clock``: the sender's time."""
        self.failure_chars += failure.text_length
        if self.failure_chars >= MAX_FAILURE_CHARS:
            [failure] = limit_failure_texts([failure], 0)
        self.failures[failure.rank] = replace(failure, moment=to_local_time(failure.moment, clock, now))

    @property
    def cause_timeout_s(self) -> float:
        """How long to wait for the cause of the first failure, which is a lost connection."""
        return PROGRAM_FAILURE_DELAY_S if self.awaits_program else SECONDARY_FAILURE_DELAY_S

    def add_report(self, node: int, message: AttemptReport) -> None:
        """Add a node's final report, with the last lines of its failed ranks."""
        self.remove_node(node)
        for rank, tail in message.tails:
            self.failures[rank] = replace(self.failures[rank], tail=tail)
        self.stopped_ranks += message.stopped

    def set_launcher_failure(self, message: AttemptReport, node: JoinedNode, at: str, now: float) -> None:
        """Record that a launcher lost its own processes; ``at``: the host, for the message."""
        assert message.broken is not None
        moment = to_local_time(message.broken.time, message.clock, now)
        if self.launcher_failure is None or moment < self.launcher_failure.time:
            self.launcher_failure = NodeFailure(moment, node.node_rank, node.host, message.broken.reason + at)

    @property
    def first_launcher_failure(self) -> NodeFailure | None:
        """The failure of a launcher's own process, unless a rank had failed before."""
        return self._keep_if_first(self.launcher_failure)

    @property
    def first_lost_node(self) -> NodeFailure | None:
        """The first node that was lost or has left, unless a rank had failed before."""
        return self._keep_if_first(self.lost_nodes[0] if self.lost_nodes else None)

    def _keep_if_first(self, failure: NodeFailure | None) -> NodeFailure | None:
        return failure if failure and failure.happened_before(self.failure_report) else None

    @property
    def failure_report(self) -> FailureReport | None:
        """The first cause and the other failures; None if no rank failed."""
        if self.stop_cause is not None and self.stop_cause.failure is not None:
            first = self.stop_cause.failure
            others = [each for each in self.failures.values() if each.rank != first.rank]
            # A rank that is stopped closes its connections: another that loses one was stopped too.
            failed = [each for each in others if not each.is_secondary or each.is_timeout or each.moment < first.moment]
            stopped = self.stopped_ranks + len(others) - len(failed)
            stopped -= self.stop_cause.rank_was_alive and len(others) == len(self.failures)
            stopped = min(stopped, self.world_size - 1 - len(failed))  # a rank's process may outlive its program
            return FailureReport(
                first,
                (),
                tuple(limit_failure_texts(failed, MAX_REPORT_CHARS)),
                stopped,
                self.world_size,
                self.stop_cause.reason,
            )
        if not self.failures:
            return None
        return find_first_cause((*self.failures.values(),), self.stopped_ranks, self.world_size)

    def stopped_result(self, remark: str) -> JobResult:
        """Return the result of a job with a stop cause; ``remark``: what the ranks were doing, or ""."""
        assert self.stop_cause is not None
        if self.stop_cause.failure is not None:
            return JobResult(self.stop_cause.code, self.failure_report)
        if self.stop_cause.of_program and (report := self.failure_report):
            remark = report.first.headline
        return self.stop_cause.result(remark)

    def accepts_stop_cause(self, cause: StopCause) -> bool:
        """Whether this cause may stop the attempt: no stop for another reason has begun.

        A program's failure may if nothing else has failed, or if the job waits for it; a time limit may unless the
        features are asked before a stop already.
        """
        return (self.awaits_program or self.is_clean) if cause.of_program else not self.sides_to_reply

    @property
    def is_clean(self) -> bool:
        """Whether nothing has failed."""
        return not (self.failures or self.lost_nodes or self.launcher_failure or self.stop_cause)
