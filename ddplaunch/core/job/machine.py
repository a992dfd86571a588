"""The job's state machine, which runs in node 0's launcher (also in a job of one node).

The rules, in plain words:

- ``on(event, now)`` takes one event and returns the commands that follow from it. It reads no clock, socket or file,
  starts no timer and calls nothing outside; ``wake_at()`` is the moment at which it wants the event ``Woken``.
- Nodes join (JOINING) until all have, or for an elastic job until the join window closes. A feature may have every node
  check itself (CHECKING). Then every node with ranks gets StartAttempt (RUNNING).
- The first failure of a rank, a lost node, a signal or a time limit stops the ranks on all nodes (STOPPING). A rank
  that only lost its connection to another one stops them a moment later: the failure of that one is the cause. Before
  the stop, features may ask the ranks what they are doing.
- A feature may run other programs: their failure stops the ranks too, and the job may last longer than its ranks.
- In an attempt a node is RUNNING, FINISHED (its ranks have ended with 0) or DRAINED (it has sent its AttemptReport, so
  no process is left there); IDLE nodes have no ranks. A node that does not report in time counts as lost.
- After the last report ``NextStep`` decides: another attempt after a wait (PAUSING), or the end of the job (ENDED).
- A message of an earlier attempt changes nothing, and nothing changes after the end.
- At the end every node that is there gets EndJob, and no deadline is left.

The network (``core/net/coordinator_server.py``) feeds events and executes commands. A node is named by the node rank
given on its command line (--node-rank); the one that its processes get may change with each attempt.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import JobResult, RankFailure
from ddplaunch.core.job import compatibility, job_events
from ddplaunch.core.job.job_attempt import (
    PHASE_TRANSITIONS,
    PHASES_WITH_RANKS,
    PHASES_WITHOUT_RANKS,
    SECONDARY_FAILURE_DELAY_S,
    JobAttempt,
    JobPhase,
    NodeFailure,
    StopCause,
)
from ddplaunch.core.job.job_sides import JobSides, NamedFeatures
from ddplaunch.core.job.joining import Joining, ReportTimeout, SlowNodeNotices
from ddplaunch.core.job.membership import Membership
from ddplaunch.core.job.next_step import NextStep, Pause, StopReason
from ddplaunch.core.job.node_checks import NodeChecks
from ddplaunch.core.job.node_table import JoinedNode, NodePhase, NodeTable
from ddplaunch.core.job.rpc import REQUEST_DEADLINE, Rpc
from ddplaunch.core.job.signal_deduplicator import SignalDeduplicator
from ddplaunch.core.job.time_limits import TimeLimits
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import ForwardSignal, NodeHello
from ddplaunch.core.options import Elastic, Preemption, Stopping

EARLY_REPORT_DELAY_S = 0.6  # after a failure: print its headline then if the full report is not ready


class JobMachine:
    """The decisions of one job: first ``Start``, then what the nodes send, until the phase is ENDED."""

    def __init__(self, config: JobConfig, hello: NodeHello, run_id: str, features: NamedFeatures | None = None) -> None:
        """``hello`` is node 0's own; ``features``: by name, None for all."""
        self._config, self._run_id, self._own_hello = config, run_id, hello
        self._options = config.options
        self._nodes = nodes = NodeTable(config)
        self._turn, self._deadlines = nodes.turn, nodes.turn.deadlines
        self._rpc = Rpc(nodes)
        self.phase, self._attempt = JobPhase.JOINING, JobAttempt()
        self._membership = Membership(nodes)  # which of the nodes get ranks
        self._limits = TimeLimits(nodes)
        self._sides = JobSides(run_id, nodes, self._limits, self._rpc, features)
        self._stop = StopReason(nodes)
        self._next_step = NextStep(nodes, self._membership, self._limits, self._stop, self._sides)
        self._wait_notices = SlowNodeNotices(nodes, hello.node_spec.kind)
        self._report_timeout = ReportTimeout(self._turn)
        self._checks = NodeChecks(nodes, self._membership)
        self._joining = Joining(nodes, hello.node_spec.kind)
        self._signals = SignalDeduplicator()
        self._handlers: dict[str, Callable[[], object]] = {
            "join timeout": self._on_join_timeout,
            "join window": self._start_attempt,
            "join status": self._joining.send_status,
            "slow checks": lambda: self._launch_attempt() if self._checks.on_deadline() else None,
            "early report": self._report_failure_early,
            "secondary failure": lambda: self._stop_ranks(signal.SIGTERM),
            "preempt grace": self._on_preempt_grace_expired,
            "wait notice": self._wait_notices.send,
            "report step": self._on_report_step,
            "restart": self._start_attempt,
            "timeout": lambda: self._on_stop_cause(self._limits.on_timeout()),
        }
        """By deadline. ``_set_phase`` cancels them, but not the timeout of the job."""

    def on(self, event: job_events.Event, now: Now) -> list[job_events.Command]:
        """Handle an event, and return the commands that follow from it.

        Raises ProtocolError if a node cannot have sent this message now, so its connection is to be closed. Commands
        that precede the error are returned with the next event, ``ConnectionLost``.
        """
        self._turn.now = now
        match event:
            case job_events.Woken():
                while (name := self._deadlines.pop_due(now.mono)) is not None:
                    self._on_deadline(name)
                    self._do_deferred()
            case job_events.MessageReceived(node_rank, message):
                self._on_message(node_rank, message)
            case job_events.ClockMeasured(node_rank, offset):
                if node_rank in self._nodes:
                    self._nodes[node_rank].clock_offset = offset
            case job_events.ConnectionLost(node_rank, reason, silent_s):
                self._on_node_lost(node_rank, reason, silent_s)
            case job_events.HelloReceived(connection, NodeHello() as hello):
                self._on_hello(connection, hello)
            case job_events.HelloReceived(connection, messages.JoinDeclined() as declined):
                self._on_declined(connection, declined)
            case job_events.Start():
                self._on_start()
        self._do_deferred()
        return self._turn.take_commands()

    def wake_at(self) -> float | None:
        """The monotonic time of the next deadline; None without any."""
        return self._deadlines.next

    def _do_deferred(self) -> None:
        """Do what features have requested, and pass replies on to them, until nothing is left."""
        while True:
            if self._sides.requested:
                if (cause := self._sides.requested.popleft()) is None:
                    self._check_reports()
                elif self.phase is JobPhase.RUNNING or (cause.of_program and self.phase is not JobPhase.PAUSING):
                    self._on_stop_cause(cause)
            elif self._rpc.deliver_next():
                self._stop_after_replies()
            else:
                return

    def _on_deadline(self, name: str) -> None:
        if name in self._handlers:
            self._handlers[name]()
        elif name.startswith(REQUEST_DEADLINE):
            self._rpc.on_deadline(name)
        else:
            self._sides.on_deadline(name)

    # ---------------------------------------------------------------------------------------------------- joining

    def _on_start(self) -> None:
        self._nodes[0] = JoinedNode(0, self._own_hello)  # also where --control none gives this node another node rank
        self._joining.begin()
        self._check_joined()

    def _on_hello(self, connection: int, hello: NodeHello) -> None:
        """Let a node join, or refuse it: that ends the job while nodes are still joining."""
        hello = self._nodes.assign_node_rank(hello)
        if refusal := compatibility.join_refusal(self._own_hello, hello, self._nodes, self.phase):
            if self.phase is JobPhase.JOINING:
                self._end(JobResult(EXIT_USAGE, usage_error=(refusal.message, refusal.hint)))
            return self._turn.commands.append(job_events.Refuse(connection, refusal))
        self._turn.commands.append(job_events.Accept(connection, hello, late=self._attempt.number >= 0))
        self._add_node(hello)

    def _on_declined(self, connection: int, declined: messages.JoinDeclined) -> None:
        """Called when a node cannot join: end the job while nodes are still joining, else continue without it."""
        refusal = messages.JoinRefused(declined.text, declined.hint)
        if declined.run_id != self._own_hello.run_id:
            refusal = messages.JoinRefused("this is another job", "give every node of a job the same --run-id")
        elif self.phase is JobPhase.JOINING:
            self._end(JobResult(EXIT_USAGE, usage_error=(refusal.message, refusal.hint)))
        elif self.phase is not JobPhase.ENDED:
            self._nodes.broadcast_note(f"{declined.text}; it does not take part")
        self._turn.commands.append(job_events.Refuse(connection, refusal))

    def _on_join_timeout(self) -> None:
        if why := self._joining.on_timeout():
            self._end(JobResult(EXIT_UNAVAILABLE, remark=why))

    def _check_joined(self) -> None:
        if self._joining.is_complete():
            self._start_attempt()

    def _add_node(self, hello: NodeHello) -> None:
        """Add a node that was accepted, to the first attempt or a later one."""
        self._nodes.add(hello)
        for warning in compatibility.compatibility_warnings(self._own_hello, hello):
            self._nodes.broadcast_note(warning)
        if self.phase is JobPhase.JOINING:
            self._check_joined()
        elif self.phase is JobPhase.CHECKING or (self._checks.are_required and self._may_grow):
            self._checks.send_check(hello.node_spec.node_rank)
        elif self._may_grow:
            self._stop_to_grow(hello.node_spec.name)
        elif self.phase is JobPhase.RUNNING and not self._nodes.are_all_running():
            self._nodes.broadcast_note(f"{hello.node_spec.name} has joined, but the job is about to end")
        else:
            self._nodes.broadcast_note(self._membership.late_join_note(self._nodes[hello.node_spec.node_rank]))

    @property
    def _may_grow(self) -> bool:
        """Whether the attempt is interrupted to give ranks to a node that joins now (--grow); not if it ends anyway."""
        wanted = self._options[Elastic].grow and self._membership.has_room
        goes_on = self.phase is JobPhase.RUNNING and self._attempt.is_clean and not self._stop.is_known
        return wanted and goes_on and self._nodes.are_all_running()

    def _stop_to_grow(self, name: str) -> None:
        self._attempt.stopping_to_change_nodes = True
        self._nodes.broadcast_note(f"{name} has joined: stopping the ranks, to start again with it")
        self._stop_ranks(signal.SIGTERM)

    # --------------------------------------------------------------------------------------------------- an attempt

    def _start_attempt(self) -> None:
        """Begin the next attempt: first the node checks, if any."""
        requests = self._sides.before_start(self._attempt.number + 1)
        if requests:
            self._set_phase(JobPhase.CHECKING)
        if not self._checks.begin(requests):
            self._launch_attempt()

    def _on_check(self, node: JoinedNode, message: messages.CheckPassed | messages.CheckContinues) -> None:
        if self.phase is JobPhase.CHECKING:
            if self._checks.on_check(node.node_rank, message):
                self._launch_attempt()
        elif self._may_grow and node.phase is NodePhase.IDLE and isinstance(message, messages.CheckPassed):
            self._stop_to_grow(node.name)

    def _launch_attempt(self) -> None:
        """Assign the ranks to the nodes of the attempt, and send each node its StartAttempt."""
        self._set_phase(JobPhase.RUNNING)
        active, number = self._membership.commit_nodes(), self._attempt.number + 1
        numbers, world_size = {node.node_rank for node in active}, sum(node.rank_count for node in active)
        self._attempt = JobAttempt(number, world_size, self._turn.now.mono, numbers, set(numbers))
        self._limits.begin(number)
        self._sides.on_attempt_start(number)
        self._nodes.start_ranks(active, number, self._run_id)

    def _on_message(self, node_rank: int, message: messages.FromNode) -> None:
        """Handle a message of a node; ProtocolError, before any change, if the node cannot have sent it now."""
        node = self._nodes.get(node_rank)
        if node is None or self.phase is JobPhase.ENDED:
            return
        match message:
            case messages.StopRequested():
                self._on_stop_requested(node, message)
            case messages.PreemptionNotice():
                self._on_preemption_notice(node, message.signal)
            case messages.NodeStartError():
                self._on_start_error(node, message)
            case messages.CheckPassed() | messages.CheckContinues():
                self._on_check(node, message)
            case messages.RpcRequest() | messages.RpcReply():
                self._rpc.on_message(node_rank, message)
            case ForwardSignal(number=number):
                if self._signals.should_forward(node_rank, number, self._turn.now.mono):
                    self._nodes.broadcast(message)
            case messages.FeatureMessage():
                self._sides.on_message(node_rank, message)
            case messages.AttemptMessage(attempt=self._attempt.number):
                self._on_attempt_message(node, message)

    def _on_attempt_message(self, node: JoinedNode, message: messages.FromNode) -> None:
        about_ranks = messages.FailureReported | messages.RanksFinished | messages.AttemptReport
        if node.node_rank and isinstance(message, about_ranks):  # node 0 is this process and needs no check
            node.validate_message(message, self._attempt.failures)
        match message:
            case messages.FailureReported(failure=failure, clock=clock):
                self._on_rank_failure(failure, clock)
            case messages.RanksFinished():
                self._on_ranks_finished(node)
            case messages.AttemptReport():
                self._on_attempt_report(node, message)
            case _:
                self._limits.on_message(node.node_rank, message)
        self._sides.on_message(node.node_rank, message)

    def _on_start_error(self, node: JoinedNode, message: messages.NodeStartError) -> None:
        if self.phase is JobPhase.CHECKING or (self._checks.are_required and self.phase is JobPhase.PAUSING):
            result = self._checks.on_check_failed(node, message, first=self._attempt.number < 0)
            if isinstance(result, JobResult):
                return self._end(result)
            self._nodes.leave_out(self._remove_node(node.node_rank), result, (result, message.hint))
            return self._on_node_gone(node.node_rank)
        text = f"{node.name}: {message.message}" if self._config.is_multi_node else message.message
        if node.phase is not NodePhase.IDLE or self.phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return self._end(JobResult(EXIT_USAGE, usage_error=(text, message.hint)))
        # it has joined during the attempt, which continues without it
        self._nodes.leave_out(self._remove_node(node.node_rank), f"{text}; it does not take part", (text, message.hint))

    def _on_rank_failure(self, failure: RankFailure, clock: float) -> None:
        self._attempt.add_failure(failure, clock, self._turn.now.wall)
        if self.phase is not JobPhase.RUNNING or self._stop.preempted_by:  # others may be writing a checkpoint
            return
        if not (failure.is_secondary or self._sides.awaits_program(self._attempt, failure)):
            self._stop_with_early_report()
        elif len(self._attempt.failures) == 1:  # it only lost its connection: wait for the cause
            self._sides.before_stop(self._attempt)
            self._turn.set_deadline("secondary failure", SECONDARY_FAILURE_DELAY_S)

    def _stop_with_early_report(self) -> None:
        self._attempt.awaits_program = False
        if "early report" not in self._deadlines:
            self._turn.set_deadline("early report", EARLY_REPORT_DELAY_S)
        self._stop_ranks(signal.SIGTERM)

    def _report_failure_early(self) -> None:
        if not self._attempt.was_reported_early and (text := self._next_step.early_report(self._attempt)):
            self._attempt.was_reported_early = True
            self._nodes.broadcast_note(text)

    def _on_ranks_finished(self, node: JoinedNode) -> None:
        if node.phase is NodePhase.RUNNING:
            node.set_phase(NodePhase.FINISHED)
        self._attempt.running_nodes.discard(node.node_rank)
        if not self._attempt.running_nodes:  # the nodes end leftover processes, then report
            self._report_timeout.begin(self._options[Stopping].grace)
        elif self.phase is JobPhase.RUNNING:
            self._wait_notices.on_node_finished(self._attempt.number)

    def _on_attempt_report(self, node: JoinedNode, message: messages.AttemptReport) -> None:
        node.set_phase(NodePhase.DRAINED)
        self._attempt.add_report(node.node_rank, message)
        self._stop.preemption_seen |= message.preemption_seen
        if node.leaving:
            self._nodes.end_leaving_node(self._remove_node(node.node_rank))
        elif message.broken:
            at = f" (on {node.host})" if len(self._nodes) > 1 else ""
            self._attempt.set_launcher_failure(message, node, at, self._turn.now.wall)
            self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def _on_node_lost(self, node_rank: int, why: str, silent_s: float = 0.0) -> None:
        """Called when a node's connection is lost, or its heartbeats stopped ``silent_s`` seconds ago."""
        if node_rank not in self._nodes or self.phase is JobPhase.ENDED:
            return
        node = self._remove_node(node_rank)
        if self.phase is JobPhase.JOINING:
            self._nodes.broadcast_note(f"{node.name} has left: {why}")
            return self._check_joined()
        if node.leaving:
            return self._on_node_gone(node_rank)
        if node.phase is NodePhase.DRAINED and not self._attempt.failures and self.phase is JobPhase.RUNNING:
            return self._check_reports()  # its ranks had ended with 0
        text = f"{node.name} was lost: {why}"
        if self.phase in PHASES_WITHOUT_RANKS:
            if self._membership.shortage:
                return self._end(JobResult(EXIT_UNAVAILABLE, remark=text))
            self._membership.count_loss(node)
            self._nodes.broadcast_note(text)
            return self._on_node_gone(node_rank)
        if node.phase is NodePhase.IDLE:  # a spare, or it has joined too late for this attempt
            return self._nodes.broadcast_note(text) if self._options[Elastic].spares else None
        self._attempt.lost_nodes.append(NodeFailure(self._turn.now.wall - silent_s, node_rank, node.host, text))
        self._nodes.send(0, messages.NodeLost(node.host))
        self._membership.on_node_failed(node)
        self._nodes.broadcast_note(f"{text}; stopping the others" if self.phase is JobPhase.RUNNING else text)
        self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def _remove_node(self, node_rank: int) -> JoinedNode:
        node = self._nodes.pop(node_rank)
        self._attempt.remove_node(node_rank)
        self._limits.on_hold_changed(node_rank, is_holding=False)
        self._rpc.on_node_lost(node_rank)
        return node

    def _on_node_gone(self, node_rank: int) -> None:
        """Called when a node is lost that no rank needs."""
        if self.phase is not JobPhase.CHECKING:
            self._check_reports()
        elif self._checks.on_node_gone(node_rank):
            self._launch_attempt()

    def _drop_node(self, node_rank: int, why: str) -> None:
        self._turn.commands.append(job_events.Disconnect(node_rank))
        self._on_node_lost(node_rank, why)

    def _on_stop_requested(self, node: JoinedNode, message: messages.StopRequested) -> None:
        """Called when a launcher got a signal to end the job: stop all ranks, the second time without grace."""
        may_be_for_node = message.signal == signal.SIGTERM and not message.reason and not self._stop.is_known
        if may_be_for_node and self._membership.can_leave(node, self.phase):
            return None if node.leaving else self._continue_without(node)
        was_repeated, grace_s = self._stop.is_repeated, self._stop.add_request(node, message)
        # After a third signal no node is waited for: EndJob makes them kill what is left.
        if self.phase in PHASES_WITHOUT_RANKS or (was_repeated and grace_s is not None):
            return self._end(JobResult(self._stop.exit_code))
        if grace_s is not None:
            self._stop_ranks(self._stop.signal, grace_s)

    def _continue_without(self, node: JoinedNode) -> None:
        """Let a node leave that got a SIGTERM (eviction, scale-down); if it has ranks, start again without it."""
        node.leaving = True
        if node.phase is NodePhase.RUNNING:
            self._attempt.add_leaving_node(node, self._turn.now.wall)
            text = f"SIGTERM on {node.name}: it leaves the job; stopping the ranks, to continue without it"
            self._nodes.broadcast_note(text)
            self._stop_ranks(signal.SIGTERM)
        elif not node.has_ranks:  # its launcher ends by itself
            if self.phase is not JobPhase.JOINING:
                self._nodes.broadcast_note(node.leave_note)
            self._drop_node(node.node_rank, "SIGTERM")

    def _on_preemption_notice(self, node: JoinedNode, signal_number: int) -> None:
        """Called on the scheduler's notice: let all ranks save a checkpoint, stop them after --preempt-grace.

        A rank failure that is reported from now on does not stop the other ranks; a lost node still does.
        """
        if self._stop.preempted_by is not None:
            return
        self._stop.add_preemption(node, signal_number)
        if self.phase in PHASES_WITHOUT_RANKS:
            remark = f"preempted by {self._stop.preempted_by}: no rank was running"
            return self._end(JobResult(EXIT_PREEMPTED, remark=remark))
        grace = f"ranks have {self._options[Preemption].preempt_grace:g} s (--preempt-grace) to save a checkpoint"
        what = grace if self.phase is JobPhase.RUNNING else "the ranks are being stopped already"
        self._nodes.broadcast_note(f"preempted by {self._stop.preempted_by}: {what}")
        self._nodes.broadcast(messages.PreemptRanks(self._attempt.number))
        self._turn.set_deadline("preempt grace", self._options[Preemption].preempt_grace)

    def _on_preempt_grace_expired(self) -> None:
        if self.phase is JobPhase.RUNNING:
            seconds = self._options[Preemption].preempt_grace
            self._nodes.broadcast_note(f"--preempt-grace ({seconds:g} s) expired: stopping the ranks")
            self._stop_ranks(signal.SIGTERM)

    def _stop_ranks(self, signal_number: int, grace_s: float | None = None) -> None:
        """Send all ranks a signal, SIGKILL after ``grace_s`` seconds (None: --grace).

        If there is time, the requests of features come first; their replies call this again. While the ranks are being
        stopped already, a call has an effect only with ``grace_s``: they get this signal too, and with 0 SIGKILL.
        """
        in_time = self.phase is JobPhase.RUNNING and grace_s != 0 and not self._stop.preempted_by
        if in_time and self._sides.before_stop(self._attempt):
            return self._attempt.stops_after_replies.append((signal_number, grace_s))
        if self.phase is JobPhase.RUNNING:
            self._set_phase(JobPhase.STOPPING)
        elif self.phase is not JobPhase.STOPPING or grace_s is None:
            return
        grace_s = self._options[Stopping].grace if grace_s is None else grace_s
        stop = messages.StopAttempt(self._attempt.number, signal_number, grace_s)
        for node in self._nodes.values():
            if node.has_ranks:
                self._nodes.send(node.node_rank, stop)
        self._report_timeout.begin(grace_s)
        if not self._attempt.unreported_nodes:  # the job lasted longer than its ranks
            self._check_reports()

    def _stop_after_replies(self) -> None:
        """Stop the ranks if that waited for replies to features, and the last of these has come."""
        if self._attempt.sides_to_reply:
            return
        stops, self._attempt.stops_after_replies = self._attempt.stops_after_replies, []
        for signal_number, grace_s in stops:
            self._stop_ranks(signal_number, grace_s)
        self._check_reports()

    def _on_report_step(self) -> None:
        """Treat nodes that have not sent their AttemptReport in time as lost."""
        if (limit_s := self._report_timeout.on_step()) is not None:
            for number in sorted(self._attempt.unreported_nodes - {0}):
                self._drop_node(number, f"it did not report the end of its ranks within {limit_s:g} s")

    def _on_stop_cause(self, cause: StopCause) -> None:
        """Called when a time limit has expired, or another program has failed: stop the ranks, or end."""
        if self.phase in PHASES_WITHOUT_RANKS:
            self._end(cause.result())
        elif self.phase is JobPhase.RUNNING and not self._stop.is_known and self._attempt.accepts(cause):
            self._attempt.stop_cause = cause
            if cause.failure is None:
                self._nodes.broadcast_note(f"{cause.reason}: stopping the ranks")
            self._stop_with_early_report()

    def _check_reports(self) -> None:
        """Decide what comes next once every node has sent its AttemptReport, and features have their replies."""
        if self.phase not in PHASES_WITH_RANKS or self._attempt.unreported_nodes or self._attempt.sides_to_reply:
            return
        self._deadlines.cancel("report step")
        if self.phase is JobPhase.STOPPING or not self._sides.holds_end(self._attempt):
            step = self._next_step.decide(self._attempt, was_stopped=self.phase is JobPhase.STOPPING)
            self._pause(step) if isinstance(step, Pause) else self._end(step)

    def _pause(self, pause: Pause) -> None:
        self._set_phase(JobPhase.PAUSING)
        self._checks.previous_failure = pause.failure
        self._nodes.clear_assignments()
        self._attempt = JobAttempt(self._attempt.number)
        self._turn.set_deadline("restart", pause.delay_s)

    def _end(self, outcome: JobResult) -> None:
        self._set_phase(JobPhase.ENDED)
        self._limits.end()
        self._sides.on_job_end(outcome)
        self._rpc.end()
        self._deadlines.cancel()
        self._nodes.broadcast(messages.EndJob(outcome))

    def _set_phase(self, phase: JobPhase) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"{self.phase} to {phase}"
        self.phase = phase
        stopping = phase is JobPhase.STOPPING
        self._deadlines.cancel(*({"wait notice"} if stopping else self._handlers.keys() - {"timeout"}))
