"""The coordinator: the state machine of the whole job, which runs in node 0's launcher (also in a job of one node).

It has no sockets. ``CoordinatorServer`` calls it with what nodes send (``on_message``, ``on_node_lost``) and sends its
messages. Its phases are JOINING, CHECKING (optional), RUNNING, STOPPING, PAUSING (between attempts) and ENDED.

The usual course: nodes join (``check_hello``, ``add_node``); ``_launch_attempt`` assigns the ranks and sends
StartAttempt; a failure, a lost node, a signal or a time limit calls ``_stop_ranks``; each node sends an AttemptReport
once its ranks have ended; after the last report ``_decide_next`` starts another attempt (a restart) or ends the job.
In an attempt a node is RUNNING, FINISHED (its ranks have ended with 0) or DRAINED (reported); IDLE nodes have no ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from functools import partial

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_TIMEOUT, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.event_loop import Callback, Timer, Timers
from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.failures import FailureReport, JobResult, RankFailure, format_early_report
from ddplaunch.core.feature import Feature
from ddplaunch.core.job import compatibility
from ddplaunch.core.job.job_attempt import (
    JOB_PHASE_TRANSITIONS,
    PHASES_WITHOUT_RANKS,
    SECONDARY_FAILURE_DELAY_S,
    JobAttempt,
    JobPhase,
    NodeFailure,
    TimeLimitExpired,
)
from ddplaunch.core.job.job_sides import JobSides
from ddplaunch.core.job.joining import Joining, SlowNodeNotices
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.node_checks import NodeChecks
from ddplaunch.core.job.node_table import JoinedNode, NodePhase, NodeTable
from ddplaunch.core.job.restart_policy import RestartPolicy
from ddplaunch.core.job.rpc import Rpc
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import ForwardSignal, HeartbeatMessage, Message, NodeHello
from ddplaunch.core.net.clock_offset import UNKNOWN
from ddplaunch.core.rpc_kind import GetOffset
from ddplaunch.system.plan import node_spec

EARLY_REPORT_DELAY_S = 0.6  # after a failure: print its headline then if the full report is not ready
DRAIN_TIMEOUT_S = 30.0  # beyond the grace, for a node's AttemptReport: twice what unkillable processes take


class Coordinator:
    """The job's state machine. It identifies a node by the node rank given on its command line (--node-rank).

    The node rank that its processes get may change from attempt to attempt (``NodeAssignment``).
    """

    def __init__(
        self,
        config: JobConfig,
        hello: NodeHello,
        run_id: str,
        send: Callable[[int, Message], None],
        disconnect: Callable[[int], None],
        call_later: Callable[[float, Callback], Timer],
        clock: Callable[[], float] = time.monotonic,
        clock_of: GetOffset = lambda node: UNKNOWN,
        features: Iterable[tuple[str, Feature]] | None = None,
    ) -> None:
        """``hello`` is node 0's own; ``call_later`` and ``clock`` are the loop's; ``features``: by name, None for all.

        ``send(node_rank, message)`` sends a control message; ``disconnect(node_rank)`` closes a node's connection.
        """
        self._config, self._run_id, self._own_hello = config, run_id, hello
        self._disconnect, self._clock = disconnect, clock
        self._nodes = nodes = NodeTable(config, send)
        self._rpc = Rpc(nodes, call_later, clock_of)
        self._phase, self._attempt = JobPhase.JOINING, JobAttempt()
        self._membership = Membership(nodes)  # which of the nodes get ranks
        self._restarts = RestartPolicy(config)  # whether a failed attempt is repeated, and when
        self._limits = limits = TimeLimits(nodes, call_later, self._on_time_limit, clock)
        self._sides = JobSides(run_id, nodes, limits, self._rpc, clock_of, self._on_time_limit, call_later, features)
        self._stop_signal: int | None = None
        self._stop_reason: str | None = None  # set if a rank or a command requested the stop
        self._stop_repeated = False  # whether the stop was requested a second time, so without grace
        self._preempted_by: str | None = None  # the notice: "SIGUSR2 on node 1"
        self._preemption_seen = False  # whether a rank has called runtime.preempted() and got True
        timers = Timers(call_later)
        self._call_later, self._cancel_timers = timers.call_later, timers.cancel_all
        kind, is_running = hello.node_spec.kind, lambda: self._phase is JobPhase.RUNNING
        self._wait_notices = SlowNodeNotices(nodes, kind, self._call_later, is_running)
        actions = (self._call_later, self._launch_attempt, self._end)
        self._checks = NodeChecks(nodes, self._membership, self._sides.before_start, *actions)
        self._previous_failure: FailureReport | None = None  # the result if a node fails the check before the restart
        self._joining = Joining(nodes, kind, self._call_later, clock, self._start_attempt, self._end_unavailable)

    # ---------------------------------------------------------------------------------------------------- joining

    def start(self) -> None:
        self._nodes[0] = JoinedNode(0, self._own_hello)  # also where --control none gives this node another node rank
        self._joining.start()

    def check_hello(self, hello: NodeHello) -> NodeHello | messages.JoinRefused:
        """Return the hello for ``add_node``, with a node rank assigned if it has none, or why the node may not join.

        A refusal while nodes are still joining ends the job.
        """
        hello = self._nodes.assign_node_rank(hello)
        refusal = compatibility.join_refusal(self._own_hello, hello, self._nodes, self._phase)
        if refusal and self._phase is JobPhase.JOINING:
            self._end_with_usage_error(refusal.message, refusal.hint)
        return refusal or hello

    def on_declined(self, declined: messages.JoinDeclined) -> messages.JoinRefused:
        """Called when a node cannot join: end the job while nodes are still joining, else go on. Return the reply."""
        if declined.run_id != self._own_hello.run_id:
            return messages.JoinRefused("this is another job", "give every node of a job the same --run-id")
        refusal = messages.JoinRefused(declined.text, declined.hint)
        if self._phase is JobPhase.JOINING:
            self._end_with_usage_error(refusal.message, refusal.hint)
        elif self._phase is not JobPhase.ENDED:
            self._nodes.broadcast_note(f"{declined.text}; it does not take part")
        return refusal

    def add_node(self, hello: NodeHello) -> None:
        """Add a node that ``check_hello`` has accepted, to the first attempt or a later one."""
        self._nodes.add(hello)
        for warning in compatibility.compatibility_warnings(self._own_hello, hello):
            self._nodes.broadcast_note(warning)
        if self._phase is JobPhase.JOINING:
            self._joining.check()
        elif self._phase is JobPhase.CHECKING or (self._checks.are_required and self._may_grow):
            self._checks.send_check(hello.node_spec.node_rank)
        elif self._may_grow:
            self._stop_to_grow(hello.node_spec.name)
        elif self._phase is JobPhase.RUNNING and not self._nodes.are_all_running():
            self._nodes.broadcast_note(f"{hello.node_spec.name} has joined, but the job is about to end")
        else:
            self._nodes.broadcast_note(self._membership.late_join_note(self._nodes[hello.node_spec.node_rank]))

    @property
    def _may_grow(self) -> bool:
        """Whether the attempt is interrupted to give ranks to a node that joins now (--grow)."""
        wanted = self._config.grow and self._membership.has_room
        return wanted and self._phase is JobPhase.RUNNING and self._nodes.are_all_running()

    def _stop_to_grow(self, name: str) -> None:
        self._attempt.stopping_to_change_nodes = True
        self._nodes.broadcast_note(f"{name} has joined: stopping the ranks, to start again with it")
        self._stop_ranks(signal.SIGTERM)

    # --------------------------------------------------------------------------------------------------- an attempt

    def _start_attempt(self) -> None:
        """Begin the next attempt: first the node checks, if any."""
        self._cancel_timers()
        if not self._checks.prepare(self._attempt.number + 1):
            return self._launch_attempt()
        self._set_phase(JobPhase.CHECKING)
        self._checks.begin()

    def _on_check_passed(self, node: JoinedNode, attempt: int) -> None:
        if self._phase is JobPhase.CHECKING:
            self._checks.on_check_passed(node.node_rank, attempt)
        elif self._may_grow and node.phase is NodePhase.IDLE:
            self._stop_to_grow(node.name)

    def _launch_attempt(self) -> None:
        """Assign the ranks to the nodes of the attempt, and send each node its StartAttempt."""
        self._set_phase(JobPhase.RUNNING)
        self._cancel_timers()
        active = self._membership.commit_nodes()
        specs = self._nodes.assign_ranks(active)
        numbers = {node.node_rank for node in active}
        attempt = self._attempt.number + 1
        world_size, blame = active[-1].ranks.stop, self._sides.blame
        self._attempt = JobAttempt(attempt, world_size, self._clock(), numbers, set(numbers), blame=blame)
        self._limits.begin(attempt)
        self._sides.on_attempt_start(attempt)
        for node, assignment in zip(active, node_spec.assign_nodes(specs), strict=True):
            # Node 0 comes first: it removes an old FileStore before another node can open it.
            node_specs = () if node.node_rank else specs
            start = messages.StartAttempt(attempt, self._run_id, assignment, node_specs=node_specs)
            self._nodes.send(node.node_rank, start)

    def on_message(self, node_rank: int, message: messages.FromNode) -> None:
        """Handle a message of a node; ProtocolError, before any change, if the node cannot have sent it now."""
        node = self._nodes.get(node_rank)
        if node is None or self._phase is JobPhase.ENDED:
            return
        if isinstance(message, messages.StopRequested):
            return self._on_stop_requested(node_rank, message)
        if isinstance(message, messages.PreemptionNotice):
            return self._on_preemption_notice(node, message.signal)
        if isinstance(message, messages.NodeStartError):
            return self._on_start_error(node, message)
        if isinstance(message, messages.CheckPassed):
            return self._on_check_passed(node, message.attempt)
        if isinstance(message, messages.RpcRequest | messages.RpcReply):
            return self._rpc.on_message(node_rank, message)
        if isinstance(message, HeartbeatMessage | ForwardSignal):
            return  # handled by ``CoordinatorServer``
        if message.attempt != self._attempt.number:
            return
        about_ranks = messages.FailureReported | messages.RanksFinished | messages.AttemptReport
        if node_rank and isinstance(message, about_ranks):  # node 0 is this process and needs no check
            node.validate_message(message, self._attempt.failures)
        match message:
            case messages.FailureReported(failure=failure, clock=clock):
                self._on_rank_failure(failure, clock)
            case messages.RanksFinished():
                self._on_ranks_finished(node)
            case messages.AttemptReport():
                self._on_attempt_report(node, message)
            case _:
                self._limits.on_message(node_rank, message)
        self._sides.on_message(node_rank, message)

    def _on_start_error(self, node: JoinedNode, message: messages.NodeStartError) -> None:
        if self._phase is JobPhase.CHECKING or (self._checks.are_required and self._phase is JobPhase.PAUSING):
            return self._checks.on_check_failed(node, message, self._previous_failure, first=self._attempt.number < 0)
        text = f"{node.name}: {message.message}" if self._config.is_multi_node else message.message
        if node.phase is not NodePhase.IDLE or self._phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return self._end_with_usage_error(text, message.hint)
        del self._nodes[node.node_rank]  # it has joined during the attempt, which goes on without it
        self._nodes.broadcast_note(f"{text}; it does not take part")
        self._nodes.send(node.node_rank, messages.EndJob(JobResult(EXIT_USAGE, usage_error=(text, message.hint))))

    def _on_rank_failure(self, failure: RankFailure, clock: float) -> None:
        self._attempt.add_failure(failure, clock)
        if self._phase is not JobPhase.RUNNING or self._preempted_by:  # others may be writing a checkpoint
            return
        if not failure.is_secondary:
            self._call_later(EARLY_REPORT_DELAY_S, self._report_failure_early)
            self._stop_ranks(signal.SIGTERM)
        elif len(self._attempt.failures) == 1:  # it only lost its connection: wait for the rank that is the cause
            self._sides.before_stop(self._attempt, self._check_reports)
            self._call_later(SECONDARY_FAILURE_DELAY_S, lambda: self._stop_ranks(signal.SIGTERM))

    def _report_failure_early(self) -> None:
        """Print the cause of the stop before all ranks have ended, which may take up to the grace."""
        report = self._attempt.failure_report
        other_cause = self._stop_signal is not None or self._attempt.first_lost_node
        if self._phase in (JobPhase.RUNNING, JobPhase.STOPPING) and report and not other_cause:
            busy = [node.name for node in self._nodes.values() if node.phase is not NodePhase.DRAINED]
            nodes = busy if self._config.is_multi_node else ()
            headline = report.headline(several=self._config.is_multi_node)
            self._nodes.broadcast_note(format_early_report(headline, self._config.grace, nodes))

    def _on_ranks_finished(self, node: JoinedNode) -> None:
        if node.phase is NodePhase.RUNNING:
            node.set_phase(NodePhase.FINISHED)
        self._attempt.running_nodes.discard(node.node_rank)
        if not self._attempt.running_nodes:  # the nodes end leftover processes, then report
            self._wait_for_reports(self._config.grace)
        else:
            self._wait_notices.on_node_finished(self._attempt.number)

    def _on_attempt_report(self, node: JoinedNode, message: messages.AttemptReport) -> None:
        node.set_phase(NodePhase.DRAINED)
        self._attempt.add_report(node.node_rank, message)
        self._preemption_seen |= message.preemption_seen
        if node.leaving:
            self._nodes.end_leaving_node(node)
        elif message.broken:
            self._attempt.set_launcher_failure(message, node, f" (on {node.host})" if len(self._nodes) > 1 else "")
            self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def on_node_lost(self, node_rank: int, why: str, silent_s: float = 0.0) -> None:
        """Called when a node's connection is lost, or its heartbeats stopped ``silent_s`` seconds ago."""
        if node_rank not in self._nodes or self._phase is JobPhase.ENDED:
            return
        node = self._nodes.pop(node_rank)
        self._attempt.remove_node(node_rank)
        self._limits.on_hold_changed(node_rank, is_holding=False)
        self._rpc.on_node_lost(node_rank)
        if self._phase is JobPhase.JOINING:
            self._nodes.broadcast_note(f"{node.name} has left: {why}")
            return self._joining.check()
        if node.leaving:
            return self._checks.on_node_gone(node_rank) if self._phase is JobPhase.CHECKING else self._check_reports()
        if node.phase is NodePhase.DRAINED and not self._attempt.failures and self._phase is JobPhase.RUNNING:
            return self._check_reports()  # its ranks had ended with 0
        text = f"{node.name} was lost: {why}"
        if self._phase in PHASES_WITHOUT_RANKS:
            if self._membership.shortage:
                return self._end_unavailable(text)
            self._membership.changes += 1
            self._nodes.broadcast_note(text)
            return self._checks.on_node_gone(node_rank) if self._phase is JobPhase.CHECKING else None
        if node.phase is NodePhase.IDLE:  # a spare, or it has joined too late for this attempt
            return self._nodes.broadcast_note(text) if self._config.spares else None
        self._attempt.lost_nodes.append(NodeFailure(time.time() - silent_s, node_rank, node.host, text))
        self._nodes.send(0, messages.NodeLost(node.host))
        self._membership.on_node_failed(node)
        self._nodes.broadcast_note(f"{text}; stopping the others" if self._phase is JobPhase.RUNNING else text)
        self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def _on_stop_requested(self, node_rank: int, message: messages.StopRequested) -> None:
        """Called when a launcher got a signal to end the job: stop all ranks, the second time without grace."""
        node = self._nodes[node_rank]
        is_stopping = self._stop_signal is not None or self._preempted_by
        may_be_for_node = message.signal == signal.SIGTERM and not message.reason and not is_stopping
        if may_be_for_node and self._membership.can_leave(node, self._phase):
            return None if node.leaving else self._continue_without(node)
        # Slurm and Kubernetes signal all nodes at once: only a second signal on the same node shortens the grace.
        if first := self._stop_signal is None:
            self._stop_signal = message.signal
            self._stop_reason = f"stopped because {message.reason}" if message.reason else None
            name = "Ctrl-C" if message.signal == signal.SIGINT else signal_name(message.signal)
            self._nodes.broadcast_note(f"{message.reason or name} on {node.name}", but=node_rank)
        again = message.again and not first  # an earlier SIGTERM may only have removed that node
        # After a third signal no node is waited for: EndJob makes them kill what is left.
        if self._phase in PHASES_WITHOUT_RANKS or (self._stop_repeated and again):
            return self._end(JobResult(EXIT_SIGNAL + self._stop_signal))
        self._stop_repeated |= again
        if first or again:
            self._stop_ranks(self._stop_signal, 0.0 if again else self._config.grace)

    def _continue_without(self, node: JoinedNode) -> None:
        """Let a node leave that got a SIGTERM (eviction, scale-down); if it has ranks, start again without it."""
        node.leaving = True
        if node.phase is NodePhase.RUNNING:
            self._attempt.add_leaving_node(node)
            text = f"SIGTERM on {node.name}: it leaves the job; stopping the ranks, to go on without it"
            self._nodes.broadcast_note(text)
            self._stop_ranks(signal.SIGTERM)
        elif not node.has_ranks:  # its launcher ends by itself
            if self._phase is not JobPhase.JOINING:
                self._nodes.broadcast_note(node.leave_note)
            self._disconnect(node.node_rank)
            self.on_node_lost(node.node_rank, "SIGTERM")

    def _on_preemption_notice(self, node: JoinedNode, signal_number: int) -> None:
        """Called on the scheduler's notice: let all ranks save a checkpoint, stop them after --preempt-grace.

        A rank failure that is reported from now on does not stop the other ranks; a lost node still does.
        """
        if self._preempted_by is not None:
            return
        self._preempted_by = signal_name(signal_number) + (f" on {node.name}" if self._config.is_multi_node else "")
        if self._phase in PHASES_WITHOUT_RANKS:
            remark = f"preempted by {self._preempted_by}: no rank was running"
            return self._end(JobResult(EXIT_PREEMPTED, remark=remark))
        seconds = f"{self._config.preempt_grace:g} s (--preempt-grace)"
        self._nodes.broadcast_note(f"preempted by {self._preempted_by}: ranks have {seconds} to save a checkpoint")
        self._nodes.broadcast(messages.PreemptRanks(self._attempt.number))
        self._call_later(self._config.preempt_grace, self._on_preempt_grace_expired)

    def _on_preempt_grace_expired(self) -> None:
        if self._phase is JobPhase.RUNNING:
            text = f"--preempt-grace ({self._config.preempt_grace:g} s) expired: stopping the ranks"
            self._nodes.broadcast_note(text)
            self._stop_ranks(signal.SIGTERM)

    def _stop_ranks(self, signal_number: int, grace_s: float | None = None) -> None:
        """Send all ranks a signal, SIGKILL after ``grace_s`` seconds (None: --grace).

        If there is time, the requests of features come first; their replies call this again. While the ranks are being
        stopped already, only a call with ``grace_s`` has an effect: it replaces the earlier grace.
        """
        later = partial(self._stop_after_replies, self._attempt, signal_number, grace_s)
        in_time = self._phase is JobPhase.RUNNING and grace_s != 0 and not self._preempted_by
        if in_time and self._sides.before_stop(self._attempt, later):
            return
        if self._phase is JobPhase.RUNNING:
            self._set_phase(JobPhase.STOPPING)
        elif self._phase is not JobPhase.STOPPING or grace_s is None:
            return
        grace_s = self._config.grace if grace_s is None else grace_s
        stop = messages.StopAttempt(self._attempt.number, signal_number, grace_s)
        for node in list(self._nodes.values()):
            if node.has_ranks:
                self._nodes.send(node.node_rank, stop)
        self._wait_for_reports(grace_s)

    def _stop_after_replies(self, attempt: JobAttempt, signal_number: int, grace_s: float | None) -> None:
        """Called when the requests of features that ``_stop_ranks`` has sent are answered."""
        if attempt is self._attempt:
            self._stop_ranks(signal_number, grace_s)
            self._check_reports()

    def _wait_for_reports(self, grace_s: float, waited_s: float = 0.0) -> None:
        """After grace and DRAIN_TIMEOUT_S, treat nodes without an AttemptReport as lost, despite their heartbeats.

        Waits in steps of at most 5 s, so that a suspension of this process adds no more than one step.
        """
        if waited_s < (limit := grace_s + DRAIN_TIMEOUT_S):
            step = min(5.0, limit - waited_s)
            return self._call_later(step, partial(self._wait_for_reports, grace_s, waited_s + step))
        for number in sorted(self._attempt.unreported_nodes - {0}):
            self._disconnect(number)
            self.on_node_lost(number, f"it did not report the end of its ranks within {limit:g} s")

    def _on_time_limit(self, expired: TimeLimitExpired) -> None:
        """Called when --timeout or the time limit of a feature has expired: stop the ranks, or end."""
        if self._phase in PHASES_WITHOUT_RANKS:
            self._end(JobResult(EXIT_TIMEOUT, remark=expired.reason))
        elif self._phase is JobPhase.RUNNING and not (self._preempted_by or self._attempt.sides_to_reply):
            self._attempt.time_limit = expired
            if expired.failure is None:
                self._nodes.broadcast_note(f"{expired.reason}: stopping the ranks")
            self._call_later(EARLY_REPORT_DELAY_S, self._report_failure_early)
            self._stop_ranks(signal.SIGTERM)

    # ------------------------------------------------------------------------------------------------ after an attempt

    def _check_reports(self) -> None:
        """Decide what comes next once every node has sent its AttemptReport, and features have their replies."""
        if self._attempt.sides_to_reply:
            return
        if self._phase in (JobPhase.RUNNING, JobPhase.STOPPING) and not self._attempt.unreported_nodes:
            self._cancel_timers()
            self._decide_next()

    def _decide_next(self) -> None:
        """Called when no rank of the attempt is left on any node: restart, or end the job.

        The first of the causes below that applies decides, whatever came first in time.
        """
        attempt, report = self._attempt, self._attempt.failure_report
        succeeded = self._phase is JobPhase.RUNNING and attempt.is_clean
        if self._stop_signal is not None:
            why = "; ".join(filter(None, (self._stop_reason, self._sides.remark(time_limit=False))))
            self._end(JobResult(EXIT_SIGNAL + self._stop_signal, remark=why or None))
        elif self._preempted_by and not (succeeded and not self._preemption_seen):
            advice = f"the same command may be run again (exit code {EXIT_PREEMPTED})"
            remark = f"preempted by {self._preempted_by}: {advice}"
            self._end(JobResult(EXIT_PREEMPTED, report, remark=remark))
        elif launcher_failure := attempt.first_launcher_failure:
            self._restart_or_end(None, launcher_failure)
        elif cause := attempt.first_lost_node:
            self._restart_with_changed_nodes(cause.reason)
        elif attempt.time_limit and not attempt.time_limit.may_restart:
            self._end(attempt.time_limit_result(self._sides.remark(time_limit=True)))
        elif report is None and attempt.stopping_to_change_nodes:
            self._restart_with_changed_nodes("")
        elif report is None:
            self._end(JobResult(0))
        elif report.first.refused:
            self._end(JobResult(EXIT_USAGE, usage_error=report.first.refused))
        else:
            self._restart_or_end(report, None)

    def _restart_or_end(self, report: FailureReport | None, launcher_failure: NodeFailure | None) -> None:
        """Called when a rank failed or a launcher process was lost: restart all ranks if allowed, else end."""
        decision = self._restarts.decide(
            self._attempt, self._clock() - self._attempt.started_at, deadline_passed=self._limits.timeout_expired
        )
        wait, why_not = decision.delay_s, decision.remark
        if wait is not None and (shortage := self._membership.record_failure(report, launcher_failure)):
            wait, why_not = None, f"{shortage} to start again"
        if report:
            what = report.headline(several=self._config.is_multi_node)
        else:
            what = launcher_failure.reason if launcher_failure else ""
        if wait is None:
            code = report.first.shell_exit_code if report else EXIT_SIGNAL + signal.SIGKILL
            remark = why_not if report else "; ".join(filter(None, (what, why_not)))
            return self._end(JobResult(code, report, remark=remark))
        text = f"{what}\n{self._restarts.describe_restart(wait)}"
        self._nodes.broadcast(messages.Restarting(self._attempt.number + 1, wait, text, report))
        self._wait_before_restart(wait, report)

    def _restart_with_changed_nodes(self, why: str) -> None:
        """Start again with the nodes that are there now; counts for --max-membership-changes, not --max-restarts."""
        if self._limits.timeout_expired:
            remark = "; ".join(filter(None, (why, "--timeout has expired")))
            return self._end(JobResult(EXIT_TIMEOUT, remark=remark))
        if over := self._membership.count_change(why):
            return self._end_unavailable(over)
        self._nodes.broadcast_note(self._membership.next_attempt_note)
        self._wait_before_restart(0, None)

    def _wait_before_restart(self, delay_s: float, previous_failure: FailureReport | None) -> None:
        self._set_phase(JobPhase.PAUSING)
        self._previous_failure = previous_failure
        self._nodes.clear_assignments()
        self._attempt = JobAttempt(self._attempt.number)
        self._call_later(delay_s, self._start_attempt)

    def _end_unavailable(self, why: str) -> None:
        self._end(JobResult(EXIT_UNAVAILABLE, remark=why))

    def _end_with_usage_error(self, message: str, hint: str | None) -> None:
        self._end(JobResult(EXIT_USAGE, usage_error=(message, hint)))

    def _end(self, outcome: JobResult) -> None:
        self._set_phase(JobPhase.ENDED)
        self._cancel_timers()
        self._limits.end()
        self._sides.on_job_end(outcome)
        self._nodes.broadcast(messages.EndJob(outcome))

    def _set_phase(self, phase: JobPhase) -> None:
        assert phase in JOB_PHASE_TRANSITIONS[self._phase], f"{self._phase} to {phase}"
        self._phase = phase
