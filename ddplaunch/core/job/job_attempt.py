"""The phases of a job, and the state of one attempt: failures, lost nodes and which nodes still run, of all nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.core.failures import (
    MAX_REPORT_CHARS,
    FailureReport,
    JobResult,
    RankFailure,
    find_first_cause,
    limit_text,
)
from ddplaunch.core.job.node_table import JoinedNode, NodeTable
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.messages import AttemptReport, RanksInspected
from ddplaunch.core.net.clock_offset import to_local_time
from ddplaunch.features.inspect.diagnosis.culprit import describe_ended_ranks, find_culprit
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
from ddplaunch.features.inspect.diagnosis.stall_check import describe_activity
from ddplaunch.features.inspect.diagnosis.wait_sentences import describe_waits
from ddplaunch.features.inspect.diagnosis.waits import find_waits

SECONDARY_FAILURE_DELAY_S = 1.0  # after a lost connection, wait for the peer's own failure before stopping
BEFORE_STOP_TIMEOUT_S = 1.0  # for the inspection before the ranks are stopped
LONG_WAIT_S = 10.0  # in a collective: a longer wait may have been a hang
MAX_FAILURE_CHARS = 16 << 20  # of the texts of all failures of an attempt; later ones are cut to one line


class JobPhase(Enum):
    """The phase of the whole job."""

    JOINING = "waiting for nodes"
    CHECKING = "every node checks its machine"
    RUNNING = "the ranks run"
    STOPPING = "the ranks are being stopped"
    PAUSING = "no ranks; waiting for the restart"
    ENDED = "the job has ended"


JOB_PHASE_TRANSITIONS = {
    JobPhase.JOINING: {JobPhase.CHECKING, JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.CHECKING: {JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.RUNNING: {JobPhase.STOPPING, JobPhase.PAUSING, JobPhase.ENDED},
    JobPhase.STOPPING: {JobPhase.PAUSING, JobPhase.ENDED},
    JobPhase.PAUSING: {JobPhase.CHECKING, JobPhase.RUNNING, JobPhase.ENDED},
    JobPhase.ENDED: set[JobPhase](),
}

PHASES_WITHOUT_RANKS = {JobPhase.JOINING, JobPhase.CHECKING, JobPhase.PAUSING}
"""Phases in which no rank runs."""


class NodeFailure(Struct, frozen=True):
    """A node with ranks that was lost or has left, or whose launcher lost its own processes (as the zygote)."""

    time: float
    node: int  # its node rank as given on its command line
    host: str
    reason: str
    left: bool = False  # it left after a SIGTERM, which its ranks may have got earlier than the launcher

    def happened_before(self, verdict: FailureReport | None) -> bool:
        """Whether this is the cause of a rank's failure, and not the other way round."""
        if verdict is None or verdict.first.is_secondary:
            return True
        unsure = self.left if verdict.first.host == self.host else verdict.first.message is not None
        return verdict.first.moment > self.time - (SECONDARY_FAILURE_DELAY_S if unsure else 0.0)


class TimeLimitExpired(Struct, frozen=True):
    """A time limit that stops an attempt although no rank has failed."""

    reason: str  # for the message
    failure: RankFailure | None  # of the rank that the others waited for; None if unknown
    rank_was_alive: bool = False  # whether that rank's process had not ended
    may_restart: bool = False  # --on-stall restart
    inspection: Inspection | None = None  # what all ranks were doing, if already known


class JobAttempt(Struct):
    """One attempt: one start of all ranks, on all nodes."""

    number: int = -1  # 0 is the first, -1 none yet
    world_size: int = 0
    started_at: float = 0.0  # on the coordinator's clock
    running_nodes: set[int] = field(default_factory=set)  # nodes whose ranks have not all finished
    unreported_nodes: set[int] = field(default_factory=set)  # nodes without an AttemptReport: ranks may be left there
    failures: list[RankFailure] = field(default_factory=list)
    lost_nodes: list[NodeFailure] = field(default_factory=list)
    stopped_ranks: int = 0  # number of ranks that were stopped
    launcher_failure: NodeFailure | None = None  # the earliest, of all nodes
    stopping_to_change_nodes: bool = False  # it is being stopped to add a node, or because one leaves
    is_inspecting: bool = False  # the inspection before the stop is in progress
    after_inspection: list[Callable[[], object]] = field(default_factory=list)  # called once it is done
    inspection: Inspection | None = None  # its result
    time_limit: TimeLimitExpired | None = None  # that stopped the attempt
    failure_chars: int = 0  # in the texts of all failures

    def remove_node(self, node: int) -> None:
        """Called when no rank is left on this node, or it is lost. (Sets: comparing all nodes would cost N².)"""
        self.running_nodes.discard(node)
        self.unreported_nodes.discard(node)

    def add_leaving_node(self, node: JoinedNode) -> None:
        """Record that a node with ranks leaves the job."""
        self.lost_nodes.append(NodeFailure(time.time(), node.node_rank, node.host, node.leave_note, left=True))
        self.stopping_to_change_nodes = True

    def add_failure(self, failure: RankFailure, clock: float) -> None:
        """Add a failure, with its full texts until MAX_FAILURE_CHARS is reached; ``clock``: the sender's time."""
        self.failure_chars += failure.text_length
        self._store_failures(
            limit_text([failure], failure.text_length if self.failure_chars < MAX_FAILURE_CHARS else 0), clock
        )

    def add_report(self, node: int, message: AttemptReport) -> None:
        """Add a node's final report; its failures replace those that were reported at once, without all details."""
        self.remove_node(node)
        ranks = {each.rank for each in message.failures}
        self.failures = [each for each in self.failures if each.rank not in ranks]
        self._store_failures(limit_text(message.failures, MAX_REPORT_CHARS), message.clock)
        self.stopped_ranks += message.stopped

    def _store_failures(self, failures: Iterable[RankFailure], clock: float) -> None:
        self.failures += [replace(each, moment=to_local_time(each.moment, clock)) for each in failures]

    def set_launcher_failure(self, message: AttemptReport, node: JoinedNode, at: str) -> None:
        """Record that a launcher lost its own processes; ``at``: the host, for the message."""
        assert message.broken is not None
        moment = to_local_time(message.broken.time, message.clock)
        if self.launcher_failure is None or moment < self.launcher_failure.time:
            self.launcher_failure = NodeFailure(moment, node.node_rank, node.host, message.broken.reason + at)

    @property
    def first_launcher_failure(self) -> NodeFailure | None:
        """The launcher failure, unless a rank had failed before."""
        return (
            self.launcher_failure
            if self.launcher_failure and self.launcher_failure.happened_before(self.failure_report)
            else None
        )

    @property
    def first_lost_node(self) -> NodeFailure | None:
        """The first node that was lost or has left, unless a rank had failed before."""
        return (
            self.lost_nodes[0] if self.lost_nodes and self.lost_nodes[0].happened_before(self.failure_report) else None
        )

    @property
    def failure_report(self) -> FailureReport | None:
        """The first cause and the other failures; None if no rank failed."""
        if self.time_limit is not None and self.time_limit.failure is not None:
            first = self.time_limit.failure
            others = tuple(each for each in self.failures if each.rank != first.rank)
            stopped = self.stopped_ranks - (self.time_limit.rank_was_alive and len(others) == len(self.failures))
            stopped = min(stopped, self.world_size - 1 - len(others))  # a rank's process may outlive its program
            return FailureReport(
                first, (), tuple(limit_text(others, MAX_REPORT_CHARS)), stopped, self.world_size, self.time_limit.reason
            )
        if not self.failures:
            return None
        verdict = find_first_cause(self.failures, self.stopped_ranks, self.world_size)
        if self.inspection is None or not verdict.first.is_secondary:
            return verdict
        first, blame = verdict.first, self._blamed_rank()
        if not first.is_timeout and (ended := describe_ended_ranks(self.inspection, first.moment)):
            first = replace(first, hint="\n".join(filter(None, (first.hint, ended))))
        return replace(verdict, first=first, blame=blame)

    @property
    def time_limit_result(self) -> JobResult:
        """The result of a job that a time limit has stopped."""
        assert self.time_limit is not None
        if self.time_limit.failure is not None:
            return JobResult(EXIT_TIMEOUT, self.failure_report)
        doing = describe_activity(self.inspection) if self.inspection else ""
        return JobResult(EXIT_TIMEOUT, remark=f"{self.time_limit.reason}: {doing}" if doing else self.time_limit.reason)

    def _blamed_rank(self) -> str | None:
        """The rank that the failed ranks had waited for, if they only report a timeout or a lost connection."""
        if self.inspection is None:
            return None
        tracebacks = [(each.rank, each.traceback or each.message or "") for each in self.failures]
        timed_out = any(each.is_timeout for each in self.failures)
        found = find_culprit(self.inspection, tracebacks, timed_out=timed_out, folder=os.getcwd())
        hosts = {each.rank: each.host for each in self.inspection.ranks}
        if found is None or len(set(hosts.values())) < 2 or found.ranks[0] not in hosts:
            return found.text if found else None
        return f"{found.text} (on {hosts[found.ranks[0]]})"

    @property
    def wait_summary(self) -> str | None:
        """Which ranks waited for which when the job was stopped, if longer than LONG_WAIT_S: perhaps a hang."""
        found = self.inspection
        if found is None:
            return None
        entered = [each.entered for rank in found.ranks for each in rank.last if not each.completed]
        # When send, recv and init_process_group began is not known: use how long the ranks printed nothing.
        quiet_for = {rank.rank: rank.quiet or 0.0 for rank in found.ranks}
        quiet_waits = [min(quiet_for[rank] for rank in wait.waiting) for wait in find_waits(found) if not wait.number]
        if not any(lasted > LONG_WAIT_S for lasted in (*quiet_waits, *(found.moment - moment for moment in entered))):
            return None
        return f"when it was stopped: {'; '.join(describe_waits(found))}"

    @property
    def is_clean(self) -> bool:
        """Whether nothing has failed."""
        return not (self.failures or self.lost_nodes or self.launcher_failure or self.time_limit)


class StopInspection:
    """Inspects all ranks before those of an attempt are stopped, once an attempt."""

    def __init__(self, nodes: NodeTable, rpc: Rpc) -> None:
        self._config, self._nodes, self._rpc = nodes.config, nodes, rpc

    def begin(self, attempt: JobAttempt, on_done: Callable[[], None]) -> bool:
        """Inspect all ranks, then call ``on_done``; False if there is no inspection to wait for."""
        if (
            attempt.inspection is None
            and not attempt.is_inspecting
            and not attempt.stopping_to_change_nodes
            and self._config.inspects_before_stop
        ):
            attempt.is_inspecting = True
            # If a rank failed by itself, the waits of the others do not matter, and take 0.1 s more to read.
            failed_by_itself = any(not failure.is_secondary for failure in attempt.failures)
            detail = Detail.STACKS if failed_by_itself else Detail.WAITS
            self._rpc.gather("inspect", detail, partial(self._on_inspected, attempt), BEFORE_STOP_TIMEOUT_S)
        if attempt.is_inspecting:
            attempt.after_inspection.append(on_done)
        return attempt.is_inspecting

    def store(self, attempt: JobAttempt, inspection: Inspection) -> None:
        """Record what the ranks of an attempt were doing before they were stopped; node 0 gets it for the report."""
        attempt.is_inspecting, attempt.inspection = False, inspection
        self._nodes.send(0, RanksInspected(inspection))

    def _on_inspected(self, attempt: JobAttempt, inspection: Inspection) -> None:
        self.store(attempt, inspection)
        for then in attempt.after_inspection:
            then()
