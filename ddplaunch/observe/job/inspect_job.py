"""Inspection on node 0: inspects all ranks before they are stopped, and explains failures by what the ranks did."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from ddplaunch.core.failures import FailureReport, JobResult, RankFailure
from ddplaunch.core.feature import JobContext, JobSide, RpcCall
from ddplaunch.core.job.job_attempt import JobAttempt, StopCause
from ddplaunch.core.messages import FromNode, NoteMessage, RanksFinished, RanksInspected
from ddplaunch.observe.diagnosis.crash import describe_crash
from ddplaunch.observe.diagnosis.culprit import describe_ended_ranks, find_culprit
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.diagnosis.stall_check import describe_activity
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits
from ddplaunch.observe.diagnosis.waits import find_waits
from ddplaunch.observe.job.awaited_rank import format_hosts
from ddplaunch.observe.job.stall_limit import StallLimit
from ddplaunch.observe.job.straggler_limit import STRAGGLER_CHECK, StragglerLimit
from ddplaunch.observe.messages import (
    ArrivalsReported,
    CrashInspected,
    CrashSeen,
    StallSuspected,
    StragglersFound,
)
from ddplaunch.observe.slow_rank_detector import SlowRankDetector

BEFORE_STOP_TIMEOUT_S = 1.0  # for the inspection before the ranks are stopped
CRASHES_TOGETHER_S = 3.0  # one may follow from the other
LONG_WAIT_S = 10.0  # in a collective: a longer wait may have been a hang


class InspectJob(JobSide):
    """Inspects the ranks of a job before an attempt is stopped, and for --stall-timeout and --straggler-timeout."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._inspection: Inspection | None = None  # of all ranks, just before those of the attempt were stopped
        self._expired: tuple[StopCause, Inspection] | None = None  # the limit that stops the attempt now
        self._attempt = 0
        self._crashed: list[tuple[int, int]] = []  # ranks that wait for an inspection in their crash: node, rank
        self._crash: tuple[float, Inspection] | None = None  # of all ranks, when one had crashed, and when (monotonic)
        self._stalls = StallLimit(context, self._stop_attempt)
        self._stragglers = StragglerLimit(context, self._stop_attempt)
        self._slow_ranks = SlowRankDetector()

    def on_attempt_start(self, attempt: int) -> None:
        self._attempt = attempt
        self._inspection = self._expired = self._crash = None
        self._crashed.clear()
        self._stalls.begin(attempt)
        self._stragglers.begin(attempt)
        self._slow_ranks = SlowRankDetector()

    def on_job_end(self, result: JobResult) -> None:
        for sentence in self._slow_ranks.describe() if result.code == 0 else ():
            self._context.send(0, NoteMessage(sentence))

    def on_deadline(self, name: str) -> None:
        if name == STRAGGLER_CHECK:
            self._stragglers.inspect()
        else:
            self._stalls.on_deadline(name)

    def on_message(self, node: int, message: FromNode) -> None:
        match message:
            case CrashSeen(rank=rank):
                self._on_crash(node, rank)
            case StallSuspected():
                self._stalls.on_suspected()
            case StragglersFound():
                self._stragglers.on_stragglers_found(node)
            case RanksFinished():
                self._stragglers.on_ranks_finished()
            case ArrivalsReported(arrivals=arrivals):
                ranks, offset = self._context.nodes[node].ranks, self._context.nodes.clock_offset_of(node)
                self._slow_ranks.add_arrivals(node, ranks, arrivals, offset)

    def _on_crash(self, node: int, rank: int) -> None:
        """Called when native code has failed in a rank: inspect all ranks, once for ranks that crash together."""
        self._crashed.append((node, rank))
        if self._crash is not None and self._context.now.mono - self._crash[0] < CRASHES_TOGETHER_S:
            self._on_crash_inspected(self._attempt, self._crash[1])
        elif len(self._crashed) == 1:
            self._context.gather("inspect", Detail.WAITS, partial(self._on_crash_inspected, self._attempt))

    def _on_crash_inspected(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        self._crash = self._context.now.mono, inspection
        for node, rank in self._crashed:
            if node in self._context.nodes:
                self._context.send(node, CrashInspected(attempt, rank, describe_crash(inspection, rank)))
        self._crashed.clear()

    def _stop_attempt(self, expired: StopCause, inspection: Inspection) -> None:
        """Stop the attempt because a time limit has expired, and keep the inspection that showed it."""
        self._expired = expired, inspection
        self._context.stop_attempt(expired)

    # ----------------------------------------------------------------------------------------- before ranks are stopped

    def before_stop(self, attempt: JobAttempt) -> RpcCall | None:
        if self._expired is not None and self._expired[0] is attempt.stop_cause:
            self._store(self._expired[1])
            self._expired = None
        if self._inspection is not None or not self._context.config.inspects_before_stop:
            return None
        # If a rank failed by itself, the waits of the others do not matter, and take 0.1 s more to read.
        failed_by_itself = any(not failure.is_secondary for failure in attempt.failures.values())
        detail = Detail.STACKS if failed_by_itself else Detail.WAITS
        return RpcCall("inspect", detail, BEFORE_STOP_TIMEOUT_S)

    def on_stop_reply(self, reply: Inspection) -> None:
        self._store(reply)

    def _store(self, inspection: Inspection) -> None:
        """Keep the last inspection of the ranks before they were stopped, and send it to node 0's launcher."""
        self._inspection = inspection
        self._context.send(0, RanksInspected(inspection))

    # ------------------------------------------------------------------------------------------------ what it explains

    def blame(self, report: FailureReport, failures: Sequence[RankFailure]) -> FailureReport:
        inspection, first = self._inspection, report.first
        if inspection is None:
            return report
        if not first.is_timeout and (ended := describe_ended_ranks(inspection, first.moment)):
            first = replace(first, hint="\n".join(filter(None, (first.hint, ended))))
        return replace(report, first=first, blame=_describe_culprit(self._context, inspection, failures))

    def remark(self, *, time_limit: bool) -> str | None:
        if self._inspection is None:
            return None
        return describe_activity(self._inspection) if time_limit else _describe_long_waits(self._inspection)


def _describe_culprit(context: JobContext, inspection: Inspection, failures: Sequence[RankFailure]) -> str | None:
    """Describe the rank that the failed ranks had waited for; None if there is none, or it is unknown."""
    tracebacks = [(each.rank, each.exception_text) for each in failures]
    timed_out = any(each.is_timeout for each in failures)
    culprit = find_culprit(inspection, tracebacks, timed_out=timed_out, folder=context.config.folder)
    return f"{culprit.text}{format_hosts(context, inspection, culprit.ranks)}" if culprit else None


def _describe_long_waits(inspection: Inspection) -> str | None:
    """Describe which ranks waited for which at the stop, if a wait took longer than LONG_WAIT_S; else None."""
    entered = [each.entered for rank in inspection.ranks for each in rank.last if not each.completed]
    # When send, recv and init_process_group began is not known: use how long the ranks printed nothing.
    quiet_for = {rank.rank: rank.quiet or 0.0 for rank in inspection.ranks}
    quiet_waits = [min(quiet_for[rank] for rank in wait.waiting) for wait in find_waits(inspection) if not wait.number]
    if not any(lasted > LONG_WAIT_S for lasted in (*quiet_waits, *(inspection.moment - moment for moment in entered))):
        return None
    return f"at the stop: {'; '.join(describe_waits(inspection))}"
