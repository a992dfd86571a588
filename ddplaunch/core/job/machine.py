"""The job's state machine, which runs in node 0's launcher (also in a job of one node).

The rules, in plain words:

- What every machine does, and does not: ``core/machine.py``. ``job_events``, ``job_deadlines`` and ``commands`` are the
  input and output. Decisions within an attempt are in ``attempt_machine``, decisions about nodes are here.
- Nodes join (JOINING) until all have, or for an elastic job until the join window closes. A feature may have every node
  check itself (CHECKING). Then every node with ranks gets StartAttempt (RUNNING).
- The first failure of a rank, a lost node, a signal or a time limit stops the ranks on all nodes (STOPPING). If a rank
  only lost its connection to another rank, the stop comes a moment later: the other rank's failure is the cause.
  Before the stop, features may ask the ranks what they are doing.
- A feature may run other programs: their failure stops the ranks too, and the job may last longer than its ranks.
- In an attempt a node is RUNNING, FINISHED (its ranks have ended with 0) or DRAINED (it has sent its AttemptReport, so
  all its processes have ended); IDLE nodes have no ranks. A node that does not report in time counts as lost.
- After the last report ``NextStepPolicy`` decides: another attempt after a wait (PAUSING), or the end (ENDED).
- The steps from phase to phase: ``JOB_TRANSITIONS``; of one node, ``NODE_TRANSITIONS``.
- A message of an earlier attempt changes nothing, and nothing changes after the end.
- At the end every node that is there gets EndJob, and no deadline is left.

The network (``core/net/coordinator_server.py``) feeds events and executes commands. A node is named by the node rank
given on its command line (--node-rank); the node rank that its ranks get may change with each attempt.
"""

from __future__ import annotations

import signal

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Deadline, Now
from ddplaunch.core.failures import JobResult
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import compatibility
from ddplaunch.core.job import job_deadlines as due
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.attempt_machine import AttemptMachine
from ddplaunch.core.job.job_attempt import (
    PHASES_WITHOUT_RANKS,
    JobPhase,
    JobStep,
    NodeFailure,
)
from ddplaunch.core.job.job_sides import NamedFeatures
from ddplaunch.core.job.joining import Joining
from ddplaunch.core.job.node_table import JoinedNode, NodePhase
from ddplaunch.core.job.signal_deduplicator import SignalDeduplicator
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.messages import ForwardSignal, NodeHello
from ddplaunch.core.options import Elastic, Preemption


class JobMachine(AttemptMachine):
    """The decisions of one job: first ``Start``, then what the nodes send, until the phase is ENDED."""

    def __init__(self, config: JobConfig, hello: NodeHello, run_id: str, features: NamedFeatures | None = None) -> None:
        """``hello`` is node 0's own; ``features``: with their names, None for all."""
        super().__init__(config, run_id, hello.node_spec.kind, features)
        self._own_hello = hello
        self._joining = Joining(self._nodes, self._deadlines, hello.node_spec.kind)
        self._signals = SignalDeduplicator()

    def _handle(self, event: MachineEvent, now: Now) -> None:
        """Handle an event. Raises ProtocolError if a node cannot have sent this message now.

        Its connection is then to be closed: ``ConnectionLost`` is the next event.
        """
        self._sides.now = now
        match event:
            case ev.DeadlineDue():
                while (deadline := self._deadlines.pop_due(now.mono)) is not None:
                    self._record(deadline, now)
                    self._on_deadline(deadline, now)
                    self._do_side_requests(now)
            case ev.MessageReceived(node_rank, message):
                self._on_message(node_rank, message, now)
            case ev.ClockMeasured(node_rank, offset):
                if node_rank in self._nodes:
                    self._nodes[node_rank].clock_offset = offset
            case ev.ConnectionLost(node_rank, reason, silent_s):
                self._on_node_lost(node_rank, reason, now, silent_s)
            case ev.HelloReceived(connection, NodeHello() as hello):
                self._on_hello(connection, hello, now)
            case ev.HelloReceived(connection, messages.JoinDeclined() as declined):
                self._on_declined(connection, declined, now)
            case ev.Start():
                self._on_start(now)
        self._do_side_requests(now)

    def _on_deadline(self, deadline: Deadline, now: Now) -> None:
        match deadline:
            case due.JoinTimeoutOver():
                if why := self._joining.on_timeout(now):
                    self._end(JobResult(EXIT_UNAVAILABLE, remark=why), now)
            case due.JoinWindowOver() | due.RestartDue():
                self._start_attempt(now)
            case due.JoinStatusDue():
                self._do(*self._joining.send_status(now))
            case due.ChecksLate():
                self._do(*self._checks.on_deadline(now))
                self._launch_if_checked(now)
            case due.EarlyReportDue():
                self._report_failure_early()
            case due.FailureCauseLate():
                self._stop_ranks(signal.SIGTERM, now)
            case due.PreemptGraceOver():
                self._on_preempt_grace_over(now)
            case due.WaitNoticeDue():
                self._do(*self._wait_notices.send(now))
            case due.ReportIntervalOver():
                self._on_report_interval_over(now)
            case due.JobTimeoutOver():
                self._on_stop_cause(self._limits.on_timeout(), now)
            case due.RequestLate():
                self._do(*self._rpc.on_deadline(deadline, now))
            case due.FeatureDeadline():
                self._sides.on_deadline(deadline)
                self._do_side_commands()

    # ---------------------------------------------------------------------------------------------------------- joining

    def _on_start(self, now: Now) -> None:
        self._nodes[0] = JoinedNode(0, self._own_hello)  # also where --control none gives this node another node rank
        self._joining.begin(now)
        self._start_if_joined(now)

    def _on_hello(self, connection: int, hello: NodeHello, now: Now) -> None:
        """Let a node join, or refuse it; a refusal ends the job while nodes are still joining."""
        hello = self._nodes.assign_node_rank(hello)
        if refusal := compatibility.join_refusal(self._own_hello, hello, self._nodes, self.phase):
            if self.phase is JobPhase.JOINING:
                self._end(JobResult(EXIT_USAGE, usage_error=(refusal.message, refusal.hint)), now)
            return self._do(do.Refuse(connection, refusal))
        self._do(do.Accept(connection, hello, late=self._attempt.number >= 0))
        self._add_node(hello, now)

    def _on_declined(self, connection: int, declined: messages.JoinDeclined, now: Now) -> None:
        """Called when a node cannot join: end the job while nodes are still joining, else continue without it."""
        refusal = messages.JoinRefused(declined.text, declined.hint)
        if declined.run_id != self._own_hello.run_id:
            refusal = messages.JoinRefused("this is another job", "give every node of a job the same --run-id")
        elif self.phase is JobPhase.JOINING:
            self._end(JobResult(EXIT_USAGE, usage_error=(refusal.message, refusal.hint)), now)
        elif self.phase is not JobPhase.ENDED:
            self._note(f"{declined.text}; it does not take part")
        self._do(do.Refuse(connection, refusal))

    def _start_if_joined(self, now: Now) -> None:
        if self._joining.is_complete(now):
            if shortage := self._membership.find_segment_shortage():
                return self._end(JobResult(EXIT_USAGE, usage_error=shortage), now)
            self._start_attempt(now)

    def _add_node(self, hello: NodeHello, now: Now) -> None:
        """Add a node that was accepted, to the first attempt or a later one."""
        self._nodes.add(hello)
        for warning in compatibility.compatibility_warnings(self._own_hello, hello, self._config):
            self._note(warning)
        if self.phase is JobPhase.JOINING:
            self._start_if_joined(now)
        elif self.phase is JobPhase.CHECKING or (self._checks.are_required and self._may_grow):
            self._do(*self._checks.send_check(hello.node_spec.node_rank, now))
        elif self._may_grow:
            self._stop_to_grow(hello.node_spec.name, now)
        elif self.phase is JobPhase.RUNNING and not self._nodes.are_all_running():
            self._note(f"{hello.node_spec.name} has joined, but the job is about to end")
        else:
            self._note(self._membership.late_join_note(self._nodes[hello.node_spec.node_rank]))

    @property
    def _may_grow(self) -> bool:
        """Whether to interrupt the attempt to give ranks to a node that joins now (--grow); no if the job is ending."""
        wanted = self._options[Elastic].grow and self._membership.has_room
        goes_on = self.phase is JobPhase.RUNNING and self._attempt.is_clean and not self._stop.is_set
        return wanted and goes_on and self._nodes.are_all_running()

    def _stop_to_grow(self, name: str, now: Now) -> None:
        self._attempt.stopping_to_change_nodes = True
        self._note(f"{name} has joined: stopping the ranks, to start again with it")
        self._stop_ranks(signal.SIGTERM, now)

    # ------------------------------------------------------------------------------------------------------ node checks

    def _start_attempt(self, now: Now) -> None:
        """Begin the next attempt: first the node checks, if any."""
        requests = self._sides.before_start(self._attempt.number + 1)
        self._do_side_commands()
        if requests:
            self._take_step(JobStep.CHECK)
        self._do(*self._checks.begin(requests, now))
        if not requests:
            self._launch_attempt(now)

    def _on_check_reply(
        self, node: JoinedNode, message: messages.CheckPassed | messages.CheckContinues, now: Now
    ) -> None:
        if self.phase is JobPhase.CHECKING:
            self._do(*self._checks.on_check(node.node_rank, message, now))
            self._launch_if_checked(now)
        elif self._may_grow and node.phase is NodePhase.IDLE and isinstance(message, messages.CheckPassed):
            self._stop_to_grow(node.name, now)

    def _launch_if_checked(self, now: Now) -> None:
        if self._checks.are_done:
            self._launch_attempt(now)

    def _on_start_error(self, node: JoinedNode, message: messages.NodeStartError, now: Now) -> None:
        if self.phase is JobPhase.CHECKING or (self._checks.are_required and self.phase is JobPhase.PAUSING):
            result = self._checks.on_check_failed(node, message, first=self._attempt.number < 0)
            if isinstance(result, JobResult):
                return self._end(result, now)
            self._leave_out(node, result, (result, message.hint), now)
            return self._on_node_gone(node.node_rank, now)
        text = f"{node.name}: {message.message}" if self._config.is_multi_node else message.message
        if node.phase is not NodePhase.IDLE or self.phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return self._end(JobResult(EXIT_USAGE, usage_error=(text, message.hint)), now)
        # it has joined during the attempt, which continues without it
        self._leave_out(node, f"{text}; it does not take part", (text, message.hint), now)

    def _leave_out(self, node: JoinedNode, note: str, error: tuple[str, str | None], now: Now) -> None:
        """Go on without a node, which ends with this error."""
        self._remove_node(node.node_rank, now)
        self._note(note)
        self._do(node.end(JobResult(EXIT_USAGE, usage_error=error)))

    # -------------------------------------------------------------------------------------------------- what nodes send

    def _on_message(self, node_rank: int, message: messages.Message, now: Now) -> None:
        """Handle a message of a node; ProtocolError, before any change, if the node cannot have sent it now."""
        node = self._nodes.get(node_rank)
        if node is None or self.phase is JobPhase.ENDED:
            return
        match message:
            case messages.StopRequested():
                self._on_stop_requested(node, message, now)
            case messages.PreemptionNotice():
                self._on_preemption_notice(node, message.signal, now)
            case messages.NodeStartError():
                self._on_start_error(node, message, now)
            case messages.CheckPassed() | messages.CheckContinues():
                self._on_check_reply(node, message, now)
            case messages.RpcRequest() | messages.RpcReply():
                self._do(*self._rpc.on_message(node_rank, message, now))
            case ForwardSignal(number=number):
                if self._signals.should_forward(node_rank, number, now.mono):
                    self._do(*self._nodes.to_all(message))
            case messages.FeatureMessage():
                self._pass_to_sides(node_rank, message)
            case messages.AttemptMessage(attempt=self._attempt.number):
                self._on_attempt_message(node, message, now)

    def _on_stop_requested(self, node: JoinedNode, message: messages.StopRequested, now: Now) -> None:
        """Called when a launcher got a signal to end the job: stop all ranks, the second time without grace."""
        may_be_for_node = message.signal == signal.SIGTERM and not message.reason and not self._stop.is_set
        if may_be_for_node and self._membership.can_leave(node, self.phase):
            return None if node.leaving else self._continue_without(node, now)
        was_repeated = self._stop.is_repeated
        grace_s, note = self._stop.add_request(node, message, self._attempt)
        self._do(*note)
        # A third signal ends the wait for nodes: EndJob makes them kill what is left.
        if self.phase in PHASES_WITHOUT_RANKS or (was_repeated and grace_s is not None):
            return self._end(self._stop.result(self._sides.explain_failures(self._attempt)), now)
        if grace_s is not None:
            self._stop_ranks(self._stop.signal, now, grace_s)

    def _continue_without(self, node: JoinedNode, now: Now) -> None:
        """Let a node leave that got a SIGTERM (eviction, scale-down); if it has ranks, start again without it."""
        node.leaving = True
        if node.phase is NodePhase.RUNNING:
            self._attempt.add_leaving_node(node, now.wall)
            text = f"SIGTERM on {node.name}: it leaves the job; stopping the ranks, to continue without it"
            self._note(text)
            self._stop_ranks(signal.SIGTERM, now)
        elif not node.has_ranks:  # its launcher ends by itself
            if self.phase is not JobPhase.JOINING:
                self._note(node.leave_note)
            self._disconnect_node(node.node_rank, "SIGTERM", now)

    def _on_preemption_notice(self, node: JoinedNode, signal_number: int, now: Now) -> None:
        """Called on the scheduler's notice: let all ranks save a checkpoint, stop them after --preempt-grace.

        A rank failure that is reported from now on does not stop the other ranks; a lost node still does.
        """
        if self._stop.preempted_by is not None:
            return
        self._stop.add_preemption(node, signal_number)
        if self.phase in PHASES_WITHOUT_RANKS:
            remark = f"preempted by {self._stop.preempted_by}: no rank was running"
            return self._end(JobResult(EXIT_PREEMPTED, remark=remark), now)
        grace = f"ranks have {self._options[Preemption].preempt_grace:g} s (--preempt-grace) to save a checkpoint"
        what = grace if self.phase is JobPhase.RUNNING else "the ranks are being stopped already"
        self._note(f"preempted by {self._stop.preempted_by}: {what}")
        self._do(*self._nodes.to_all(messages.PreemptRanks(self._attempt.number)))
        self._deadlines.set(due.PreemptGraceOver(), now.mono + self._options[Preemption].preempt_grace)

    def _on_preempt_grace_over(self, now: Now) -> None:
        if self.phase is JobPhase.RUNNING:
            seconds = self._options[Preemption].preempt_grace
            self._note(f"--preempt-grace ({seconds:g} s) expired: stopping the ranks")
            self._stop_ranks(signal.SIGTERM, now)

    # ---------------------------------------------------------------------------------------------- nodes that are lost

    def _on_node_lost(self, node_rank: int, why: str, now: Now, silent_s: float = 0.0) -> None:
        """Called when a node's connection is lost, or its heartbeats stopped ``silent_s`` seconds ago."""
        if node_rank not in self._nodes or self.phase is JobPhase.ENDED:
            return
        node = self._remove_node(node_rank, now)
        self._sides.on_node_lost(node_rank, text := f"{node.name} was lost: {why}")
        if self.phase is JobPhase.JOINING:
            self._note(f"{node.name} has left: {why}")
            return self._start_if_joined(now)
        if node.leaving:
            return self._on_node_gone(node_rank, now)
        if node.phase is NodePhase.DRAINED and not self._attempt.failures and self.phase is JobPhase.RUNNING:
            return self._decide_if_all_reported(now)  # its ranks had ended with 0
        if self.phase in PHASES_WITHOUT_RANKS:
            if self._membership.shortage:
                return self._end(JobResult(EXIT_UNAVAILABLE, remark=text), now)
            self._membership.count_loss(node)
            self._note(text)
            return self._on_node_gone(node_rank, now)
        if node.phase is NodePhase.IDLE:  # a spare, or it has joined too late for this attempt
            return self._note(text) if self._options[Elastic].spares else None
        self._attempt.lost_nodes.append(NodeFailure(now.wall - silent_s, node_rank, node.host, text))
        self._do(do.Send(0, messages.NodeLost(node.host)), *self._membership.on_node_failed(node))
        self._note(f"{text}; stopping the others" if self.phase is JobPhase.RUNNING else text)
        self._stop_ranks(signal.SIGTERM, now)
        self._decide_if_all_reported(now)

    def _on_node_gone(self, node_rank: int, now: Now) -> None:
        """Called when the job goes on without a node: take the next step if it only waited for that node."""
        if self.phase is not JobPhase.CHECKING:
            return self._decide_if_all_reported(now)
        self._do(*self._checks.stop_awaiting_node(node_rank, now))
        self._launch_if_checked(now)

    def _disconnect_node(self, node_rank: int, why: str, now: Now) -> None:
        self._do(do.Disconnect(node_rank))
        self._on_node_lost(node_rank, why, now)

    def _on_report_interval_over(self, now: Now) -> None:
        """Treat nodes that have not sent their AttemptReport in time as lost."""
        if (limit_s := self._report_timeout.on_interval_over(now)) is not None:
            for number in sorted(self._attempt.unreported_nodes - {0}):
                self._disconnect_node(number, f"it did not report the end of its ranks within {limit_s:g} s", now)
