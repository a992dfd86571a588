"""The decisions on one attempt of the job: its start, failures, the stop of its ranks, and what follows.

``machine.py`` has the rules, and decides which nodes there are.
"""

from __future__ import annotations

import signal
from typing import Literal

from ddplaunch.base.errors import EXIT_SIGNAL
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import JobResult, RankFailure
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_deadlines as due
from ddplaunch.core.job.job_attempt import (
    JOB_TRANSITIONS,
    PHASES_WITH_RANKS,
    PHASES_WITHOUT_RANKS,
    JobAttempt,
    JobPhase,
    JobStep,
    StopCause,
)
from ddplaunch.core.job.job_sides import JobSides, NamedFeatures
from ddplaunch.core.job.joining import ReportTimeout, SlowNodeNotices
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.next_step import NextStepPolicy, Pause, StopReason
from ddplaunch.core.job.node_checks import NodeChecks
from ddplaunch.core.job.node_table import JoinedNode, NodeStep, NodeTable
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Machine, next_phase
from ddplaunch.core.options import Stopping

EARLY_REPORT_DELAY_S = 0.6  # after a failure: print its headline then if the full report is not ready


class AttemptMachine(Machine):
    """The part of ``JobMachine`` that handles the attempts, one after the other."""

    def __init__(
        self, config: JobConfig, run_id: str, kind: Literal["node", "task"], features: NamedFeatures | None
    ) -> None:
        """``kind``: the word for a node in messages; ``features``: with their names, None for all."""
        super().__init__()
        self._config, self._run_id = config, run_id
        self._options = config.options
        self._nodes, self._deadlines = nodes, deadlines = NodeTable(config), Deadlines[Deadline]()
        self._rpc = Rpc(nodes, deadlines)
        self.phase, self._attempt = JobPhase.JOINING, JobAttempt()
        self._membership = Membership(nodes)  # which of the nodes get ranks
        self._limits = TimeLimits(nodes, deadlines)
        self._sides = JobSides(run_id, nodes, deadlines, self._limits, self._rpc, features)
        self._stop = StopReason(nodes)
        self._next_step = NextStepPolicy(nodes, self._membership, self._limits, self._stop, self._sides)
        self._wait_notices = SlowNodeNotices(nodes, deadlines, kind)
        self._report_timeout = ReportTimeout(deadlines)
        self._checks = NodeChecks(nodes, deadlines, self._membership)

    def wake_at(self) -> float | None:
        """The monotonic time of the next deadline; None without any."""
        return self._deadlines.next

    def _note(self, text: str) -> None:
        """Print a note on all nodes."""
        self._do(*self._nodes.note_to_all(text))

    def _do_side_commands(self) -> None:
        """Execute the commands that the features' sides have requested; called after each call of a side."""
        self._do(*self._sides.take_commands())

    def _do_side_requests(self, now: Now) -> None:
        """Execute the requests of features and deliver replies to them, until none is left."""
        self._do_side_commands()
        while True:
            if self._sides.requested_stops:
                if (cause := self._sides.requested_stops.popleft()) is None:
                    self._decide_if_all_reported(now)
                elif self.phase is JobPhase.RUNNING or (cause.of_program and self.phase is not JobPhase.PAUSING):
                    self._on_stop_cause(cause, now)
            elif self._rpc.deliver_next_reply():
                self._do_side_commands()
                self._stop_after_replies(now)
            else:
                return

    def _take_step(self, step: JobStep) -> None:
        """Go to the phase that a step leads to, and cancel the deadlines of the phase before."""
        self.phase = next_phase(JOB_TRANSITIONS, self.phase, step)
        if self.phase is JobPhase.STOPPING:
            self._deadlines.cancel(due.WaitNoticeDue())
        else:
            self._deadlines.cancel_all(due.PhaseDeadline)

    # ----------------------------------------------------------------------------------------------- start and failures

    def _launch_attempt(self, now: Now) -> None:
        """Assign the ranks to the nodes of the attempt, and send each node its StartAttempt."""
        self._take_step(JobStep.START)
        active, notes = self._membership.commit_nodes()
        self._do(*notes)
        number, numbers = self._attempt.number + 1, {node.node_rank for node in active}
        world_size = sum(node.rank_count for node in active)
        self._attempt = JobAttempt(number, world_size, now.mono, numbers, set(numbers))
        self._do(*self._limits.begin(number, now))
        self._sides.on_attempt_start(number)
        self._do_side_commands()
        self._do(*self._nodes.start_ranks(active, number, self._run_id))

    def _remove_node(self, node_rank: int, now: Now) -> JoinedNode:
        node = self._nodes.pop(node_rank)
        self._attempt.remove_node(node_rank)
        self._do(*self._limits.on_hold_changed(node_rank, now, is_holding=False))
        self._do(*self._rpc.on_node_lost(node_rank, now))
        return node

    def _on_attempt_message(self, node: JoinedNode, message: messages.Message, now: Now) -> None:
        about_ranks = messages.FailureReported | messages.RanksFinished | messages.AttemptReport
        if node.node_rank and isinstance(message, about_ranks):  # node 0 is this process and needs no check
            node.validate_message(message, self._attempt.failures)
        match message:
            case messages.FailureReported(failure=failure, clock=clock):
                self._on_rank_failure(failure, clock, now)
            case messages.RanksFinished():
                self._on_ranks_finished(node, now)
            case messages.AttemptReport():
                self._on_attempt_report(node, message, now)
            case _:
                self._do(*self._limits.on_message(node.node_rank, message, now))
        self._pass_to_sides(node.node_rank, message)

    def _pass_to_sides(self, node_rank: int, message: messages.Message) -> None:
        """Pass a message on to the sides of features; ProtocolError if the node cannot have sent it."""
        try:
            self._sides.on_message(node_rank, message)
        finally:
            self._do_side_commands()

    def _on_rank_failure(self, failure: RankFailure, clock: float, now: Now) -> None:
        self._attempt.add_failure(failure, clock, now.wall)
        if self.phase is not JobPhase.RUNNING or self._stop.preempted_by:  # others may be writing a checkpoint
            return
        is_explained = failure.is_secondary or self._sides.awaits_program(self._attempt, failure)
        self._do_side_commands()
        if not is_explained:
            self._stop_with_early_report(now)
        elif len(self._attempt.failures) == 1:  # it only lost its connection: wait for the cause
            self._ask_before_stop()
            self._deadlines.set(due.FailureCauseLate(), now.mono + self._attempt.cause_timeout_s)

    def _on_ranks_finished(self, node: JoinedNode, now: Now) -> None:
        node.take_step(NodeStep.FINISH)
        self._attempt.running_nodes.discard(node.node_rank)
        if not self._attempt.running_nodes:  # the nodes end leftover processes, then report
            self._report_timeout.begin(self._options[Stopping].grace, now)
        elif self.phase is JobPhase.RUNNING:
            self._wait_notices.on_node_finished(self._attempt.number, now)

    def _on_attempt_report(self, node: JoinedNode, message: messages.AttemptReport, now: Now) -> None:
        node.take_step(NodeStep.REPORT)
        self._attempt.add_report(node.node_rank, message)
        self._stop.preemption_seen |= message.preemption_seen
        if node.leaving:
            self._remove_node(node.node_rank, now)
            remark = "SIGTERM: this node has left the job, which continues without it"
            self._do(node.end(JobResult(EXIT_SIGNAL + signal.SIGTERM, remark=remark)))
        elif message.broken:
            at = f" (on {node.host})" if len(self._nodes) > 1 else ""
            self._attempt.set_launcher_failure(message, node, at, now.wall)
            self._stop_ranks(signal.SIGTERM, now)
        self._decide_if_all_reported(now)

    def _report_failure_early(self) -> None:
        text = None if self._attempt.was_reported_early else self._next_step.early_report(self._attempt)
        self._do_side_commands()
        if text:
            self._attempt.was_reported_early = True
            self._note(text)

    # ----------------------------------------------------------------------------------------------------- stop and end

    def _on_stop_cause(self, cause: StopCause, now: Now) -> None:
        """Called when a time limit has expired, or another program has failed: stop the ranks, or end."""
        if self.phase in PHASES_WITHOUT_RANKS:
            self._end(cause.result(), now)
        elif self.phase is JobPhase.RUNNING and not self._stop.is_set and self._attempt.accepts_stop_cause(cause):
            self._attempt.stop_cause = cause
            if cause.failure is None:
                self._note(f"{cause.reason}: stopping the ranks")
            self._stop_with_early_report(now)

    def _stop_with_early_report(self, now: Now) -> None:
        self._attempt.awaits_program = False
        if due.EarlyReportDue() not in self._deadlines:
            self._deadlines.set(due.EarlyReportDue(), now.mono + EARLY_REPORT_DELAY_S)
        self._stop_ranks(signal.SIGTERM, now)

    def _ask_before_stop(self) -> bool:
        """Send the requests that features make before the ranks are stopped; return whether replies are awaited."""
        is_awaited = self._sides.before_stop(self._attempt)
        self._do_side_commands()
        return is_awaited

    def _stop_ranks(self, signal_number: int, now: Now, grace_s: float | None = None) -> None:
        """Send all ranks a signal, SIGKILL after ``grace_s`` seconds (None: --grace).

        If there is time, the requests of features are sent first, and this is called again after the replies. While
        the ranks are being stopped already, a call has an effect only with ``grace_s``: they get this signal too, or
        SIGKILL if it is 0.
        """
        in_time = self.phase is JobPhase.RUNNING and grace_s != 0 and not self._stop.preempted_by
        if in_time and self._ask_before_stop():
            return self._attempt.stops_after_replies.append((signal_number, grace_s))
        if self.phase not in PHASES_WITH_RANKS or (self.phase is JobPhase.STOPPING and grace_s is None):
            return
        self._take_step(JobStep.STOP)
        grace_s = self._options[Stopping].grace if grace_s is None else grace_s
        stop = messages.StopAttempt(self._attempt.number, signal_number, grace_s)
        may_have_ranks, nodes = self._config.may_have_ranks, self._nodes.values()
        concerned = [each.node_rank for each in nodes if each.has_ranks or not may_have_ranks(each.node_rank)]
        self._do(*(do.Send(number, stop) for number in concerned))
        self._report_timeout.begin(grace_s, now)
        if not self._attempt.unreported_nodes:  # the job lasted longer than its ranks
            self._decide_if_all_reported(now)

    def _stop_after_replies(self, now: Now) -> None:
        """Stop the ranks, if only replies to features delayed it and the last of these replies has come."""
        if self._attempt.sides_to_reply:
            return
        stops, self._attempt.stops_after_replies = self._attempt.stops_after_replies, []
        for signal_number, grace_s in stops:
            self._stop_ranks(signal_number, now, grace_s)
        self._decide_if_all_reported(now)

    def _decide_if_all_reported(self, now: Now) -> None:
        """Decide what comes next once every node has sent its AttemptReport, and features have their replies."""
        if self.phase not in PHASES_WITH_RANKS or self._attempt.unreported_nodes or self._attempt.sides_to_reply:
            return
        self._deadlines.cancel(due.ReportIntervalOver())
        was_stopped = self.phase is JobPhase.STOPPING
        is_held = not was_stopped and self._sides.holds_end(self._attempt)
        if was_stopped and not self._stop.is_repeated:
            is_held = self._sides.holds_stop(self._stop.signal or signal.SIGTERM)
        self._do_side_commands()
        if is_held:
            return
        self._do(*self._limits.end(now))  # before the wait for another attempt, in which --timeout counts
        step, commands = self._next_step.decide(self._attempt, now, was_stopped=was_stopped)
        self._do_side_commands()
        if isinstance(step, Pause):
            self._end_attempt(step.code, step.why)
        else:
            self._end_attempt(step.code, self._describe(step))
        self._do(*commands)
        self._pause(step, now) if isinstance(step, Pause) else self._end(step, now)

    def _pause(self, pause: Pause, now: Now) -> None:
        self._take_step(JobStep.PAUSE)
        self._checks.previous_failure = pause.failure
        self._nodes.clear_assignments()
        self._attempt = JobAttempt(self._attempt.number)
        self._deadlines.set(due.RestartDue(), now.mono + pause.delay_s)

    def _end_attempt(self, code: int | None, why: str) -> None:
        """Announce the end of an attempt, once."""
        if not self._attempt.is_over:
            self._attempt.is_over = True
            self._do(*self._nodes.to_all(messages.AttemptEnded(self._attempt.number, code, why.partition("\n")[0])))

    def _describe(self, outcome: JobResult) -> str:
        """Why the job ends, in one line; "" after a success, and where the exit code alone says it."""
        if outcome.verdict is not None:
            return outcome.verdict.headline(several=self._config.is_multi_node)
        return outcome.usage_error[0] if outcome.usage_error else outcome.remark or ""

    def _end(self, outcome: JobResult, now: Now) -> None:
        if self.phase in PHASES_WITH_RANKS:
            self._end_attempt(outcome.code, self._describe(outcome))
        self._take_step(JobStep.END)
        self._do(*self._limits.end(now))
        self._sides.on_job_end(outcome)
        self._do_side_commands()
        self._rpc.end()
        self._deadlines.cancel()
        self._do(*self._nodes.to_all(messages.EndJob(outcome)))
