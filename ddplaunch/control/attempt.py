"""Where a job stands; and of one attempt what has happened to its ranks so far, on all nodes together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from enum import Enum

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.failure import (
    MAX_REPORT_CHARS,
    FailureReport,
    JobResult,
    RankFailure,
    find_first_cause,
    limit_text,
)
from ddplaunch.control.messages import AttemptReport
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.errors import EXIT_TIMEOUT

if TYPE_CHECKING:
    from ddplaunch.control.seat import JoinedNode
    from ddplaunch.control.time_limits import TimeLimitExpired
    from ddplaunch.diagnosis.inspection import Inspection

SECONDARY_FAILURE_DELAY_S = 1.0  # seconds that a rank which only lost a peer waits for the peer's own, truer, failure
LONG_WAIT_S = 10.0  # seconds: ranks that have waited longer than this in a collective may have waited for ever
MAX_FAILURE_CHARS = 16 << 20  # characters that failures may bring as they come, from all nodes together


class JobPhase(Enum):
    """Where a job stands as a whole."""

    JOINING = "waiting for nodes"
    CHECKING = "every node looks at itself"
    RUNNING = "an attempt runs"
    STOPPING = "an attempt is being stopped"
    PAUSING = "waiting to start again"
    ENDED = "all is over"


JOB_PHASE_TRANSITIONS = {
    JobPhase.JOINING: {JobPhase.CHECKING, JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.CHECKING: {JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.RUNNING: {JobPhase.STOPPING, JobPhase.PAUSING, JobPhase.ENDED},
    JobPhase.STOPPING: {JobPhase.PAUSING, JobPhase.ENDED},
    JobPhase.PAUSING: {JobPhase.CHECKING, JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.ENDED: set[JobPhase](),
}

PHASES_WITHOUT_RANKS = {JobPhase.JOINING, JobPhase.CHECKING, JobPhase.PAUSING}
"""Where no rank runs."""


@dataclass(frozen=True)
class NodeFailure:
    """A node that was lost, or has left, while it took part; or one whose own processes were lost."""

    time: float
    node: int  # its node rank, as typed
    host: str
    reason: str
    left: bool = False  # whether a signal has taken it away: its ranks may have received that signal too, and before us

    def happened_before(self, verdict: FailureReport | None) -> bool:
        """Whether this is the cause of what failed: we may not know the exception that it causes elsewhere."""
        if verdict is None or verdict.first.is_secondary:
            return True
        unsure = self.left if verdict.first.host == self.host else verdict.first.message is not None
        return verdict.first.moment > self.time - (SECONDARY_FAILURE_DELAY_S if unsure else 0.0)


@dataclass
class JobAttempt:
    """What has happened to it so far."""

    number: int = -1  # 0 is the first, -1 none yet
    world_size: int = 0
    started_at: float = 0.0  # on the coordinator's clock
    running_nodes: set[int] = field(default_factory=set)  # the nodes whose ranks have not done their work yet
    unreported_nodes: set[int] = field(default_factory=set)  # those that have something left of it
    failures: list[RankFailure] = field(default_factory=list)
    lost_nodes: list[NodeFailure] = field(default_factory=list)
    stopped_ranks: int = 0  # how many ranks ended because they were stopped
    launcher_failure: NodeFailure | None = None  # what happened first to a launcher's own processes
    stopping_to_grow: bool = False  # whether it is stopped to take a node in, or to let one leave
    is_inspecting: bool = False  # whether the ranks are being inspected, before any is stopped
    after_inspection: list[Callable[[], object]] = field(default_factory=list)  # what is to follow on that
    inspection: Inspection | None = None  # what they were doing then
    time_limit: TimeLimitExpired | None = None  # the time limit that stopped it
    failure_chars: int = 0  # characters of the failures' texts, as they came

    def remove_node(self, node: int) -> None:
        """Nothing of the attempt is left there; the sets spare N² comparisons of all nodes."""
        self.running_nodes.discard(node)
        self.unreported_nodes.discard(node)

    def leaves(self, seat: JoinedNode) -> None:
        """A node with ranks is to leave."""
        self.lost_nodes.append(NodeFailure(time.time(), seat.node_rank, seat.host, seat.has_left, left=True))
        self.stopping_to_grow = True

    def add_failure(self, failure: RankFailure, clock: float) -> None:
        """A rank has failed; its texts are kept whole until those of all ranks are too long."""
        self.failure_chars += failure.text_length
        self._store_failures(
            limit_text([failure], failure.text_length if self.failure_chars < MAX_FAILURE_CHARS else 0), clock
        )

    def add_report(self, node: int, message: AttemptReport) -> None:
        """A node's last message of the attempt; it has the failures once more, with all their details."""
        self.remove_node(node)
        ranks = {each.rank for each in message.failures}
        self.failures = [each for each in self.failures if each.rank not in ranks]
        self._store_failures(limit_text(message.failures, MAX_REPORT_CHARS), message.clock)
        self.stopped_ranks += message.stopped

    def _store_failures(self, failures: Iterable[RankFailure], clock: float) -> None:
        self.failures += [replace(each, moment=to_local_time(each.moment, clock)) for each in failures]

    def set_launcher_failure(self, message: AttemptReport, seat: JoinedNode, at: str) -> None:
        """The processes of a launcher were lost there; ``at`` says where to people."""
        assert message.broken is not None
        moment = to_local_time(message.broken.time, message.clock)
        if self.launcher_failure is None or moment < self.launcher_failure.time:
            self.launcher_failure = NodeFailure(moment, seat.node_rank, seat.host, message.broken.reason + at)

    @property
    def first_launcher_failure(self) -> NodeFailure | None:
        """What was lost of a launcher's own processes, where no rank had failed before."""
        return (
            self.launcher_failure
            if self.launcher_failure and self.launcher_failure.happened_before(self.failure_report)
            else None
        )

    @property
    def cause(self) -> NodeFailure | None:
        """The node that was lost or has left first, where no rank had failed before."""
        return (
            self.lost_nodes[0] if self.lost_nodes and self.lost_nodes[0].happened_before(self.failure_report) else None
        )

    @property
    def failure_report(self) -> FailureReport | None:
        """Which failure came first, and what it brought about; None where no rank failed."""
        if self.time_limit is not None and self.time_limit.failure is not None:
            first = self.time_limit.failure
            others = tuple(each for each in self.failures if each.rank != first.rank)
            stopped = self.stopped_ranks - (self.time_limit.rank_was_alive and len(others) == len(self.failures))
            stopped = min(
                stopped, self.world_size - 1 - len(others)
            )  # its process may live on though its program ended
            return FailureReport(
                first, (), tuple(limit_text(others, MAX_REPORT_CHARS)), stopped, self.world_size, self.time_limit.reason
            )
        if not self.failures:
            return None
        verdict = find_first_cause(self.failures, self.stopped_ranks, self.world_size)
        if self.inspection is None or not verdict.first.is_secondary:
            return verdict
        first, blame = verdict.first, self._blamed_rank()
        if not first.is_timeout and (ended := diagnosis.culprit.ended_before(self.inspection, first.moment)):
            first = replace(first, hint="\n".join(filter(None, (first.hint, ended))))
        return replace(verdict, first=first, blame=blame)

    @property
    def time_limit_result(self) -> JobResult:
        """How a job ends that a time limit has stopped."""
        assert self.time_limit is not None
        if self.time_limit.failure is not None:
            return JobResult(EXIT_TIMEOUT, self.failure_report)
        doing = diagnosis.stall.describe_activity(self.inspection) if self.inspection else ""
        return JobResult(EXIT_TIMEOUT, remark=f"{self.time_limit.reason}: {doing}" if doing else self.time_limit.reason)

    def _blamed_rank(self) -> str | None:
        """The rank that the others had waited for, where they only say that they waited."""
        if self.inspection is None:
            return None
        tracebacks = [(each.rank, each.traceback or each.message or "") for each in self.failures]
        timed_out = any(each.is_timeout for each in self.failures)
        found = diagnosis.culprit.find_culprit(self.inspection, tracebacks, timed_out=timed_out, folder=os.getcwd())
        hosts = {each.rank: each.host for each in self.inspection.ranks}
        if found is None or len(set(hosts.values())) < 2 or found.ranks[0] not in hosts:
            return found.text if found else None
        return f"{found.text} (on {hosts[found.ranks[0]]})"

    @property
    def wait_summary(self) -> str | None:
        """Who waited for whom when it was stopped, if that had lasted for long: somebody may have stopped a hang."""
        found = self.inspection
        if found is None:
            return None
        entered = [each.entered for rank in found.ranks for each in rank.last if not each.completed]
        # When send, recv and init_process_group began is not known: silence stands for that.
        quiet = {rank.rank: rank.quiet or 0.0 for rank in found.ranks}
        silent = [
            min(quiet[rank] for rank in wait.waiting) for wait in diagnosis.waits.find_waits(found) if not wait.number
        ]
        if not any(lasted > LONG_WAIT_S for lasted in (*silent, *(found.moment - moment for moment in entered))):
            return None
        return f"when it was stopped: {'; '.join(diagnosis.sentences.describe_waits(found))}"

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failures or self.lost_nodes or self.launcher_failure or self.time_limit)


def to_local_time(moment: float, clock: float) -> float:
    """Shift a moment by what another machine's clock, which shows ``clock`` now, is off: a message takes no time."""
    off = time.time() - clock
    return moment + off if abs(off) > SECONDARY_FAILURE_DELAY_S / 10 else moment
