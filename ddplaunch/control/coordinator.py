"""What the nodes of a job do next, decided in one place, on node 0; a job of one node is decided here too.

Decisions only: messages come in, messages go out. ``node_zero`` brings them from and to other machines.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.control import agreement, messages
from ddplaunch.control.attempt import (
    JOB_PHASE_TRANSITIONS,
    PHASES_WITHOUT_RANKS,
    SECONDARY_FAILURE_DELAY_S,
    JobAttempt,
    JobPhase,
    NodeFailure,
)
from ddplaunch.control.failure import FailureReport, JobResult, RankFailure, format_early_report
from ddplaunch.control.inspections import JobInspections
from ddplaunch.control.membership import Membership
from ddplaunch.control.messages import ArrivalsReported, ForwardSignal, HeartbeatMessage, Message, NodeHello
from ddplaunch.control.profiles import JobProfiles
from ddplaunch.control.restarts import RestartPolicy
from ddplaunch.control.rules import JobConfig
from ddplaunch.control.seat import JoinedNode, NodePhase, NodeTable
from ddplaunch.control.time_limits import TimeLimitExpired, TimeLimits
from ddplaunch.control.waiting import Joining, SlowNodeNotices
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_TIMEOUT, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.loop import Callback, Timer, Timers
from ddplaunch.plan import share
from ddplaunch.words import signal_name

EARLY_REPORT_DELAY_S = 0.6  # seconds after a failure when people read of it, if its report cannot be given by then
DRAIN_TIMEOUT_S = (
    30.0  # seconds beyond the grace for a node to end its ranks: twice what those that cannot be killed take
)


class Coordinator:
    """The job's course. Nodes are known by the node ranks that were typed on them."""

    def __init__(
        self,
        config: JobConfig,
        hello: NodeHello,
        run_id: str,
        send: Callable[[int, Message], None],
        disconnect: Callable[[int], None],
        call_later: Callable[[float, Callback], Timer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hello`` is node 0's own; ``call_later`` and ``clock`` are the loop's.

        ``send`` sends to a node; ``disconnect`` disconnects one that is lost to the job though it is still connected.
        """
        self._rules, self._run_id, self._own = config, run_id, hello
        self._drop, self._clock = disconnect, clock
        self._seats = seats = NodeTable(config, send)
        self._inspections = JobInspections(seats, call_later)
        self._profiles = JobProfiles(seats, call_later)
        self._stage, self._attempt = JobPhase.JOINING, JobAttempt()
        self._membership = Membership(seats)
        self._restarts = RestartPolicy(config)
        self._limits = TimeLimits(run_id, seats, self._inspections, call_later, self._on_time_limit, clock)
        self._interrupted: int | None = None
        self._reason: str | None = None  # why, where a rank wants it
        self._hurried = self._preemption_seen = False  # whether it was again; whether a rank asked for a preemption
        self._preempted: str | None = None  # by what: "SIGUSR2 on node 1"
        timers = Timers(call_later)
        self._call_later, self._cancel_timers = timers.call_later, timers.cancel_all
        kind = hello.node_spec.kind
        self._late = SlowNodeNotices(seats, kind, self._call_later, lambda: self._stage is JobPhase.RUNNING)
        if config.checks_nodes:
            from ddplaunch.control.checks import NodeChecks

            self._checks = NodeChecks(seats, self._membership, self._call_later, self._launch_attempt, self._end)
        self._before: FailureReport | None = None  # of the attempt before, where it failed
        self._joining = Joining(seats, kind, self._call_later, clock, self._start_attempt, self._end_unavailable)

    # ---------------------------------------------------------------------------------------------------- joining

    def start(self) -> None:
        self._seats[0] = JoinedNode(0, self._own)  # whichever rank this node has in a job whose nodes do not join
        self._joining.start()

    def check_hello(self, hello: NodeHello) -> NodeHello | messages.JoinRefused:
        """Return the hello of a node that may ``add_node``, with a node rank where it asked for one, or why it may not.

        A refusal before the start ends the job.
        """
        hello = self._seats.assign_node_rank(hello)
        refused = agreement.join_refusal(self._own, hello, self._seats, self._stage)
        if refused and self._stage is JobPhase.JOINING:
            self._end_with_usage_error(refused.message, refused.hint)
        return refused or hello

    def on_declined(self, declined: messages.JoinDeclined) -> messages.JoinRefused:
        """Do without a node that cannot take part, or before the start end the job; return the answer to it."""
        if declined.run_id != self._own.run_id:
            return messages.JoinRefused("this is another job", "give every node of a job the same --run-id")
        refused = messages.JoinRefused(declined.text, declined.hint)
        if self._stage is JobPhase.JOINING:
            self._end_with_usage_error(refused.message, refused.hint)
        elif self._stage is not JobPhase.ENDED:
            self._seats.broadcast_note(f"{declined.text}; it does not take part")
        return refused

    def add_node(self, hello: NodeHello) -> None:
        self._seats.add(hello)
        for warning in agreement.compatibility_warnings(self._own, hello):
            self._seats.broadcast_note(warning)
        if self._stage is JobPhase.JOINING:
            self._joining.check()
        elif self._stage is JobPhase.CHECKING or (self._rules.checks_nodes and self._may_grow):
            self._checks.send_check(hello.node_spec.node_rank)
        elif self._may_grow:
            self._stop_to_grow(hello.node_spec.name)
        elif self._stage is JobPhase.RUNNING and not self._seats.are_all_running():
            self._seats.broadcast_note(f"{hello.node_spec.name} has joined, but the job is about to end")
        else:
            self._seats.broadcast_note(self._membership.describe_late_join(self._seats[hello.node_spec.node_rank]))

    @property
    def _may_grow(self) -> bool:
        """Whether a node that joins now interrupts the attempt."""
        wanted = self._rules.grow and self._membership.has_room
        return wanted and self._stage is JobPhase.RUNNING and self._seats.are_all_running()

    def _stop_to_grow(self, name: str) -> None:
        self._attempt.stopping_to_grow = True
        self._seats.broadcast_note(f"{name} has joined: stopping the ranks, to start again with it")
        self._stop_ranks(signal.SIGTERM)

    # --------------------------------------------------------------------------------------------------- an attempt

    def _start_attempt(self) -> None:
        self._cancel_timers()
        if not self._rules.checks_nodes:
            return self._launch_attempt()
        self._set_phase(JobPhase.CHECKING)
        self._checks.begin(self._attempt.number + 1)

    def _on_check_passed(self, seat: JoinedNode, attempt: int) -> None:
        if self._stage is JobPhase.CHECKING:
            self._checks.on_check_passed(seat.node_rank, attempt)
        elif self._may_grow and seat.phase is NodePhase.IDLE:
            self._stop_to_grow(seat.name)

    def _launch_attempt(self) -> None:
        self._set_phase(JobPhase.RUNNING)
        self._cancel_timers()
        line = self._membership.commit_nodes()
        shares = self._seats.assign_ranks(line)
        nodes = {seat.node_rank for seat in line}
        self._attempt = JobAttempt(self._attempt.number + 1, line[-1].ranks.stop, self._clock(), nodes, set(nodes))
        self._limits.begin(self._attempt.number)
        number, places = self._attempt.number, share.assign_nodes(shares)
        for seat, place in zip(line, places, strict=True):
            # Node 0 comes first: it removes a store in a file before anybody can open it.
            order = messages.StartAttempt(number, self._run_id, place, node_specs=() if seat.node_rank else shares)
            self._seats.tell(seat.node_rank, order)

    def on_message(self, number: int, message: messages.FromNode) -> None:
        """Take in what a node says; raises Garbled, before anything is done, where it cannot be so."""
        seat = self._seats.get(number)
        if seat is None or self._stage is JobPhase.ENDED:
            return
        if isinstance(message, messages.StopRequested):
            return self._on_interrupt(number, message)
        if isinstance(message, messages.PreemptionNotice):
            return self._on_preemption_notice(seat, message.signal)
        if isinstance(message, messages.NodeStartError):
            return self._on_start_error(seat, message)
        if isinstance(message, messages.CheckPassed):
            return self._on_check_passed(seat, message.attempt)
        if isinstance(message, messages.InspectRequest | messages.InspectReply):
            return self._inspections.on_message(number, message)
        if isinstance(message, messages.ProfileRequest | messages.ProfileReply):
            return self._profiles.on_message(number, message)
        if (
            isinstance(message, HeartbeatMessage | ArrivalsReported | ForwardSignal)
            or message.attempt != self._attempt.number
        ):
            return
        if number and isinstance(
            message, messages.FailureReported | messages.RanksFinished | messages.AttemptReport
        ):  # our own we know
            seat.validate_message(message, {each.rank for each in self._attempt.failures})
        match message:
            case messages.FailureReported(failure=failure, clock=clock):
                self._on_rank_failure(failure, clock)
            case messages.RanksFinished():
                self._on_ranks_finished(seat)
            case messages.AttemptReport():
                self._on_attempt_report(seat, message)
            case _:
                self._limits.take(number, message)

    def _on_start_error(self, seat: JoinedNode, message: messages.NodeStartError) -> None:
        if self._stage is JobPhase.CHECKING or (self._rules.checks_nodes and self._stage is JobPhase.PAUSING):
            return self._checks.on_check_failed(seat, message, self._before, first=self._attempt.number < 0)
        text = f"{seat.name}: {message.message}" if self._rules.is_multi_node else message.message
        if seat.phase is not NodePhase.IDLE or self._stage not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return self._end_with_usage_error(text, message.hint)
        del self._seats[seat.node_rank]  # it has come late
        self._seats.broadcast_note(f"{text}; it does not take part")
        self._seats.tell(seat.node_rank, messages.EndJob(JobResult(EXIT_USAGE, usage_error=(text, message.hint))))

    def _on_rank_failure(self, failure: RankFailure, clock: float) -> None:
        self._attempt.add_failure(failure, clock)
        if self._stage is not JobPhase.RUNNING or self._preempted:  # others may be writing a checkpoint
            return
        if not failure.is_secondary:
            self._call_later(EARLY_REPORT_DELAY_S, self._report_failure_early)
            self._stop_ranks(signal.SIGTERM)
        elif len(self._attempt.failures) == 1:
            self._inspections.inspect_before_stop(self._attempt, self._check_reports)
            self._call_later(SECONDARY_FAILURE_DELAY_S, lambda: self._stop_ranks(signal.SIGTERM))

    def _report_failure_early(self) -> None:
        """Ranks take their time to stop: say by now why they must."""
        verdict = self._attempt.failure_report
        other_cause = self._interrupted is not None or self._attempt.cause
        if self._stage in (JobPhase.RUNNING, JobPhase.STOPPING) and verdict and not other_cause:
            busy = [seat.name for seat in self._seats.values() if seat.phase is not NodePhase.DRAINED]
            nodes = busy if self._rules.is_multi_node else ()
            headline = verdict.headline(several=self._rules.is_multi_node)
            self._seats.broadcast_note(format_early_report(headline, self._rules.grace, nodes))

    def _on_ranks_finished(self, seat: JoinedNode) -> None:
        if seat.phase is NodePhase.RUNNING:
            seat.set_phase(NodePhase.FINISHED)
        self._attempt.running_nodes.discard(seat.node_rank)
        if not self._attempt.running_nodes:
            self._wait_for_reports(self._rules.grace)
        else:
            self._limits.on_ranks_finished()
            self._late.on_node_finished(self._attempt.number)

    def _on_attempt_report(self, seat: JoinedNode, message: messages.AttemptReport) -> None:
        seat.set_phase(NodePhase.DRAINED)
        self._attempt.add_report(seat.node_rank, message)
        self._preemption_seen |= message.preemption_seen
        if seat.leaving:
            self._seats.let_go(seat)
        elif message.broken:
            self._attempt.set_launcher_failure(message, seat, f" (on {seat.host})" if len(self._seats) > 1 else "")
            self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def on_node_lost(self, number: int, why: str, silence: float = 0.0) -> None:
        """A node has gone, or nothing was heard of it for ``silence`` seconds."""
        if number not in self._seats or self._stage is JobPhase.ENDED:
            return
        seat = self._seats.pop(number)
        self._attempt.remove_node(number)
        self._limits.on_debugger_active(number, busy=False)
        self._inspections.on_node_lost(number)
        self._profiles.on_node_lost(number)
        if self._stage is JobPhase.JOINING:
            self._seats.broadcast_note(f"{seat.name} has left: {why}")
            return self._joining.check()
        if seat.leaving:
            return self._checks.on_node_gone(number) if self._stage is JobPhase.CHECKING else self._check_reports()
        if seat.phase is NodePhase.DRAINED and not self._attempt.failures and self._stage is JobPhase.RUNNING:
            return self._check_reports()  # it had done its work
        text = f"{seat.name} was lost: {why}"
        if self._stage in PHASES_WITHOUT_RANKS:
            if self._membership.shortage:
                return self._end_unavailable(text)
            self._membership.changes += 1
            self._seats.broadcast_note(text)
            return self._checks.on_node_gone(number) if self._stage is JobPhase.CHECKING else None
        if seat.phase is NodePhase.IDLE:
            return self._seats.broadcast_note(text) if self._rules.spares else None  # it took no part yet
        self._attempt.lost_nodes.append(NodeFailure(time.time() - silence, number, seat.host, text))
        self._seats.tell(0, messages.NodeLost(seat.host))
        self._membership.on_node_failed(seat)
        self._seats.broadcast_note(f"{text}; stopping the others" if self._stage is JobPhase.RUNNING else text)
        self._stop_ranks(signal.SIGTERM)
        self._check_reports()

    def _on_interrupt(self, number: int, message: messages.StopRequested) -> None:
        seat = self._seats[number]
        for_job = message.signal != signal.SIGTERM or message.reason or self._interrupted is not None or self._preempted
        if not for_job and self._membership.can_leave(seat, self._stage):
            return None if seat.leaving else self._leave(seat)
        # Slurm and Kubernetes signal every node at once: only the second signal on one node means "now".
        if first := self._interrupted is None:
            self._interrupted = message.signal
            self._reason = f"stopped because {message.reason}" if message.reason else None
            name = "Ctrl-C" if message.signal == signal.SIGINT else signal_name(message.signal)
            self._seats.broadcast_note(f"{message.reason or name} on {seat.name}", but=number)
        again = message.again and not first  # what came before may only have taken that node away
        # When hurried again, others are not waited for any longer: End ends what they still have.
        if self._stage in PHASES_WITHOUT_RANKS or (self._hurried and again):
            return self._end(JobResult(EXIT_SIGNAL + self._interrupted))
        self._hurried |= again
        if first or again:
            self._stop_ranks(self._interrupted, 0.0 if again else self._rules.grace)

    def _leave(self, seat: JoinedNode) -> None:
        """Have the job go on without a node that was sent a SIGTERM."""
        seat.leaving = True
        if seat.phase is NodePhase.RUNNING:
            self._attempt.leaves(seat)
            self._seats.broadcast_note(
                f"SIGTERM on {seat.name}: it leaves the job; stopping the ranks, to go on without it"
            )
            self._stop_ranks(signal.SIGTERM)
        elif not seat.has_ranks:  # its launcher ends without waiting for us
            if self._stage is not JobPhase.JOINING:
                self._seats.broadcast_note(seat.has_left)
            self._drop(seat.node_rank)
            self.on_node_lost(seat.node_rank, "SIGTERM")

    def _on_preemption_notice(self, seat: JoinedNode, number: int) -> None:
        """The job must make room. Ranks may save what they have; from now on none is stopped for another's failure."""
        if self._preempted is not None:
            return
        self._preempted = signal_name(number) + (f" on {seat.name}" if self._rules.is_multi_node else "")
        if self._stage in PHASES_WITHOUT_RANKS:
            return self._end(JobResult(EXIT_PREEMPTED, remark=f"preempted by {self._preempted}: no rank was running"))
        seconds = f"{self._rules.preempt_grace:g} s (--preempt-grace)"
        self._seats.broadcast_note(
            f"{self._preempted}: the job must make room; its ranks have {seconds} for a checkpoint"
        )
        self._seats.broadcast(messages.PreemptRanks(self._attempt.number))
        self._call_later(self._rules.preempt_grace, self._on_preempt_grace_expired)

    def _on_preempt_grace_expired(self) -> None:
        if self._stage is JobPhase.RUNNING:
            self._seats.broadcast_note(
                f"{self._rules.preempt_grace:g} s have passed (--preempt-grace): stopping the ranks"
            )
            self._stop_ranks(signal.SIGTERM)

    def _stop_ranks(self, number: int, grace: float | None = None) -> None:
        later = partial(self._stop_after_inspection, self._attempt, number, grace)
        in_time = self._stage is JobPhase.RUNNING and grace != 0 and not self._preempted
        if in_time and self._inspections.inspect_before_stop(self._attempt, later):
            return
        if self._stage is JobPhase.RUNNING:
            self._set_phase(JobPhase.STOPPING)
        elif self._stage is not JobPhase.STOPPING or grace is None:
            return
        order = messages.StopAttempt(self._attempt.number, number, self._rules.grace if grace is None else grace)
        for node, seat in list(self._seats.items()):
            if seat.has_ranks:
                self._seats.tell(node, order)
        self._wait_for_reports(order.grace_s)

    def _stop_after_inspection(self, attempt: JobAttempt, number: int, grace: float | None) -> None:
        """The ranks have been inspected."""
        if attempt is self._attempt:
            self._stop_ranks(number, grace)
            self._check_reports()

    def _wait_for_reports(self, grace: float, waited: float = 0.0) -> None:
        """Give up what has not ended its ranks when they should all have; a node that beats may yet be broken."""
        if waited < (
            limit := grace + DRAIN_TIMEOUT_S
        ):  # in steps: of a time in which we were stopped ourselves one counts
            step = min(5.0, limit - waited)
            return self._call_later(step, partial(self._wait_for_reports, grace, waited + step))
        for number in sorted(self._attempt.unreported_nodes - {0}):
            self._drop(number)
            self.on_node_lost(number, f"it has not said in {limit:g} s that its ranks have ended")

    def _on_time_limit(self, cut: TimeLimitExpired) -> None:
        """A time limit is over."""
        if self._stage in PHASES_WITHOUT_RANKS:
            self._end(JobResult(EXIT_TIMEOUT, remark=cut.reason))
        elif self._stage is JobPhase.RUNNING and not (self._preempted or self._attempt.is_inspecting):
            self._attempt.time_limit = cut
            if cut.inspection is not None:
                self._inspections.store(self._attempt, cut.inspection)
            if cut.failure is None:
                self._seats.broadcast_note(f"{cut.reason}: stopping the ranks")
            self._call_later(EARLY_REPORT_DELAY_S, self._report_failure_early)
            self._stop_ranks(signal.SIGTERM)

    # -------------------------------------------------------------------------------------------------- what follows

    def _check_reports(self) -> None:
        if self._attempt.is_inspecting:
            return
        if self._stage in (JobPhase.RUNNING, JobPhase.STOPPING) and not self._attempt.unreported_nodes:
            self._cancel_timers()
            self._decide_next()

    def _decide_next(self) -> None:
        """Nothing of the attempt is left anywhere."""
        attempt, verdict = self._attempt, self._attempt.failure_report
        whole = self._stage is JobPhase.RUNNING and attempt.is_clean
        if self._interrupted is not None:
            why = "; ".join(filter(None, (self._reason, attempt.wait_summary)))
            self._end(JobResult(EXIT_SIGNAL + self._interrupted, remark=why or None))
        elif self._preempted and not (whole and not self._preemption_seen):
            remark = f"preempted by {self._preempted}: the same command may be run again (exit code {EXIT_PREEMPTED})"
            self._end(JobResult(EXIT_PREEMPTED, verdict, remark=remark))
        elif broken := attempt.first_launcher_failure:
            self._restart_or_end(None, broken)
        elif cause := attempt.cause:
            self._restart_without_lost_nodes(cause.reason)
        elif attempt.time_limit and not attempt.time_limit.may_restart:
            self._end(attempt.time_limit_result)
        elif verdict is None and attempt.stopping_to_grow:
            self._restart_without_lost_nodes("")
        elif verdict is None:
            self._end(JobResult(0))
        elif verdict.first.refused:
            self._end(JobResult(EXIT_USAGE, usage_error=verdict.first.refused))
        else:
            self._restart_or_end(verdict, None)

    def _restart_or_end(self, verdict: FailureReport | None, broken: NodeFailure | None) -> None:
        """A rank failed, or else a launcher's own processes were lost: start all ranks again, or end."""
        decision = self._restarts.decide(
            self._attempt, self._clock() - self._attempt.started_at, deadline_passed=self._limits.over
        )
        wait, why_not = decision.delay_s, decision.remark
        if wait is not None and (few := self._membership.record_failure(verdict, broken)):
            wait, why_not = None, f"{few} to start again"
        what = verdict.headline(several=self._rules.is_multi_node) if verdict else broken.reason if broken else ""
        if wait is None:
            code = verdict.first.shell_exit_code if verdict else EXIT_SIGNAL + signal.SIGKILL
            remark = why_not if verdict else "; ".join(filter(None, (what, why_not)))
            return self._end(JobResult(code, verdict, remark=remark))
        text = f"{what}\n{self._restarts.describe_restart(wait)}"
        self._seats.broadcast(messages.Restarting(self._attempt.number + 1, wait, text, verdict))
        self._wait_before_restart(wait, verdict)

    def _restart_without_lost_nodes(self, why: str) -> None:
        if self._limits.over:
            return self._end(JobResult(EXIT_TIMEOUT, remark=f"{why}; the time of the job is over (--timeout)"))
        if over := self._membership.count_change(why):
            return self._end_unavailable(over)
        self._seats.broadcast_note(self._membership.describe_next_attempt)
        self._wait_before_restart(0, None)

    def _wait_before_restart(self, seconds: float, before: FailureReport | None) -> None:
        self._set_phase(JobPhase.PAUSING)
        self._before = before
        self._seats.clear_assignments()
        self._attempt = JobAttempt(self._attempt.number)
        self._call_later(seconds, self._start_attempt)

    def _end_unavailable(self, why: str) -> None:
        self._end(JobResult(EXIT_UNAVAILABLE, remark=why))

    def _end_with_usage_error(self, message: str, hint: str | None) -> None:
        self._end(JobResult(EXIT_USAGE, usage_error=(message, hint)))

    def _end(self, outcome: JobResult) -> None:
        self._set_phase(JobPhase.ENDED)
        self._cancel_timers()
        self._limits.end()
        self._seats.broadcast(messages.EndJob(outcome))

    def _set_phase(self, stage: JobPhase) -> None:
        assert stage in JOB_PHASE_TRANSITIONS[self._stage], f"{self._stage} to {stage}"
        self._stage = stage
