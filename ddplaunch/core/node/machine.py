"""The decisions of one node, as a pure state machine: an event goes in, the commands that follow from it come out.

What every machine does, and does not: ``core/machine.py``. ``NodeRunner`` gives this one its events, and executes its
commands. A command that is a question is answered by an event, which comes before any other event. What is decided
within an attempt is in ``attempt_machine``; messages, signals and deadlines arrive here. The rules:

- Node 0 decides for the whole job, this machine for what it can see: the processes of its own ranks.
- WAITING: node 0 orders an attempt (``StartAttempt``) or the end (``EndJob``). The ranks are requested from the zygote,
  a few at a time: in LOADING once its imports are done, in RUNNING at once.
- RUNNING: a rank that ends with an error is a failure, which is reported to node 0 at once. Node 0 then orders the
  stop. When the last rank has ended, processes that the ranks left behind are ended too (SWEEPING).
- STOPPING: the ranks got a signal (SIGINT or SIGTERM; SIGTERM 3 s after SIGINT), and SIGKILL when the grace is over. A
  rank that ends now has failed only if it recorded an exception; that counts with exit code 1.
- A signal that stops the job is reported to node 0. As node 0 may be out of reach, this node stops its ranks by itself
  soon after. A second Ctrl-C kills them at once; a second SIGTERM does not: Slurm sends it when a preemption begins and
  when it ends.
- SWEEPING: the zygote kills all its descendants. A zygote that does not answer is killed, and its ranks with it.
- DRAINING: all processes have ended. What the ranks printed is read, at most for a second. Then the attempt is
  reported, or the job ends here if node 0 has ended it.
- A lost zygote has taken its ranks with it: those that recorded an exception have failed. The next attempt has a new
  zygote.
- ENDED: a signal ends the launcher's last waits, like that for a reader of its output, a moment later; a second signal
  ends them at once. A scheduler's signal may come just as the job ends: the result is written all the same.

The steps from phase to phase: ``ATTEMPT_TRANSITIONS``.
"""

from __future__ import annotations

import signal

from ddplaunch.base.text import format_count, signal_name
from ddplaunch.core import events, messages
from ddplaunch.core.deadlines import Deadline, Now
from ddplaunch.core.failures import JobResult, describe_exit
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.attempt_machine import AttemptMachine
from ddplaunch.core.node.node_attempt import (
    RUNNING_PHASES,
    AttemptPhase,
    DrainLate,
    ForwardDue,
    ForwardRequestDue,
    GraceOver,
    NodeAttempt,
    PreemptSignalDue,
    SigtermDue,
    StopOrderLate,
    SweepLate,
)
from ddplaunch.core.node.signals import BroadcastSignalFilter, InspectKey
from ddplaunch.core.signals import DUPLICATE_WINDOW_S, STOP_SIGNALS

STOP_ORDER_TIMEOUT_S = 1.5  # for node 0 to order a stop: it may ask all nodes for something before
ZYGOTE_REPORT_DELAY_S = 1.0  # after a signal, until the zygote has reported whether it got it too
LATE_SIGNAL_DELAY_S = 2.0  # after a signal that comes after the job's end, for the last messages and output


class NodeMachine(AttemptMachine):
    """The state machine of one node: runs one attempt after the other until the job ends."""

    def __init__(
        self, *, grace_s: float, inspects_before_stop: bool, preempt_signal: int | None, preempt_forward: int | None
    ) -> None:
        """``inspects_before_stop``: node 0 sends a request to all nodes before it orders a stop.

        ``preempt_signal``: the scheduler's notice; ``preempt_forward``: the signal that all ranks get then, if any.
        """
        super().__init__(grace_s)
        self._inspects_before_stop = inspects_before_stop
        self._preempt_signal, self._preempt_forward = preempt_signal, preempt_forward
        self._cannot_start = False  # the log cannot be opened: node 0 knows, and will end the job
        self._notice_sent = self._was_signalled_late = False
        self._inspect_key = InspectKey()
        self._group_signals = BroadcastSignalFilter()  # those that the ranks have got too: not to be forwarded again

    def _handle(self, event: MachineEvent, now: Now) -> None:
        if self.phase is AttemptPhase.ENDED and not isinstance(event, ev.SignalArrived):
            return
        match event:
            case ev.MessageReceived(message=message):
                self._on_message(message, now)
            case ev.ZygoteStarted():
                self._on_zygote_started()
            case ev.ProcessSpawned():
                self._on_spawned(event)
            case ev.SpawnFailed():
                self._on_spawn_failed(event, now)
            case ev.ProcessExited():
                self._on_exited(event, now)
            case ev.EndExplained():
                self._on_end_explained(event, now)
            case ev.StoreExited(pid=pid, code=code):
                self._on_store_exited(f"the store (pid {pid}) {describe_exit(code)}", now)
            case ev.ProcessesSwept() if self.phase is AttemptPhase.SWEEPING:  # a second sweep gets a second reply
                self._drain(event.found, event.stuck, now)
            case ev.ZygoteLost(how=how):
                self._on_zygote_lost(how, now)
            case ev.RemainingKilled(stuck=stuck):
                self._on_remaining_killed(stuck, now)
            case ev.ZygoteSignalled():
                self._on_zygote_signalled(event, now)
            case ev.SignalArrived():
                self._on_signal(event.number, now, from_terminal=event.from_terminal)
            case ev.ForwardableSignalArrived(number=number):
                self._deadlines.set(ForwardRequestDue(number, now.mono), now.mono + ZYGOTE_REPORT_DELAY_S)
            case ev.StopCommanded():
                for _ in range(1 + event.again):
                    self._on_signal(signal.SIGINT, now, reason=event.reason)
            case ev.StartFailed():
                self._cannot_start |= event.is_final
                self._send(messages.NodeStartError(event.message, event.hint))
            case ev.AttemptPrepared():
                self._on_prepared(event)
            case ev.SpawnsWithdrawn(ranks=ranks):
                self.attempt.in_flight.difference_update(ranks)
                self._continue(now)
            case ev.StopSent(ranks=ranks):
                for rank in ranks:
                    self.attempt.live[rank].stop_requested = True
            case ev.OutputDrained() if self.phase is AttemptPhase.DRAINING:
                self._collect_output()
            case ev.OutputCollected():
                self._on_output_collected(event, now)
            case ev.DeadlineDue():
                while due := self.attempt.deadlines.pop_due(now.mono) or self._deadlines.pop_due(now.mono):
                    self._record(due, now)
                    self._on_deadline(due, now)

    def wake_at(self) -> float | None:
        """When the next deadline is due, on the monotonic clock; None without one."""
        moments = [at for at in (self.attempt.deadlines.next, self._deadlines.next) if at is not None]
        return min(moments, default=None)

    # ----------------------------------------------------------------------------------------------- messages of node 0

    def _on_message(self, message: messages.Message, now: Now) -> None:
        attempt = self.attempt
        match message:
            case messages.JoinAccepted():
                self._do(do.OpenLog(message))
            case messages.JoinStatus():
                self._do(do.ShowFooter(message.describe(), of_job=True))
            case messages.ConnectingToNodeZero(reason=error):
                self._do(do.ShowFooter(f"waiting for node 0: {error}"))
            case messages.CoordinatorLost():
                self._do(do.ShowJobMessages())
            case messages.StartAttempt() if self._cannot_start:
                self._send(messages.AttemptReport(message.attempt, 0, now.wall))
            case messages.StartAttempt() if self.phase is AttemptPhase.WAITING:
                self.attempt = NodeAttempt(message.attempt)
                self._do(do.PrepareAttempt(message))
            case messages.StopAttempt(attempt=attempt.number):
                self._on_stop_order(message, now)
            case messages.PreemptRanks(attempt=attempt.number):
                self._on_preemption(now)
            case messages.ForwardSignal(number=number):
                delay_s = DUPLICATE_WINDOW_S if message.sent_to_group else 0
                self._deadlines.set(ForwardDue(number, now.mono), now.mono + delay_s)
            case messages.EndJob(outcome=outcome):
                self._on_job_end(outcome, now)
            case _ if event := events.event_from_message(message):  # a note, a restart: shown by observers
                self._do(do.Emit(event))

    def _on_stop_order(self, stop: messages.StopAttempt, now: Now) -> None:
        if self.phase is AttemptPhase.LOADING:
            self._end_loading(now)
        elif self.phase in RUNNING_PHASES and stop.grace_s == 0:
            self._sweep(0, now)
        elif self.phase in RUNNING_PHASES:
            self._stop_ranks(stop.signal, stop.grace_s, now)

    def _on_job_end(self, outcome: JobResult, now: Now) -> None:
        self.result = outcome
        if self.phase is AttemptPhase.WAITING:
            self._end_job()
        elif self.phase is AttemptPhase.LOADING:
            self._end_loading(now)
        elif self.phase in RUNNING_PHASES:
            self._sweep(0, now)

    def _on_preemption(self, now: Now) -> None:
        """Notify the ranks of the preemption. They end by themselves, or node 0 stops them after the grace."""
        self._is_preempted = True
        self._do(do.CreatePreemptionFile(report_error=bool(self.attempt.live)), do.Emit(events.JobPreempted()))
        notice, forward = self._preempt_signal, self._preempt_forward
        wanted = [(forward, False)] if forward is not None else []
        if notice not in (None, forward, signal.SIGINT):  # SIGINT: Python itself handles it in every rank
            wanted.append((notice, True))
        for number, only_handlers in wanted:
            due = PreemptSignalDue(number, only_handlers, self.attempt.number)
            self._deadlines.set(due, now.mono + ZYGOTE_REPORT_DELAY_S)

    # ----------------------------------------------------------------------------------------------- signals, deadlines

    def _on_signal(self, number: int, now: Now, *, reason: str = "", from_terminal: bool = False) -> None:
        """Handle one of ``STOP_SIGNALS``; ``reason``: set if a rank or a command, no signal, requested it."""
        if number == signal.SIGTSTP:
            return self._do(do.SuspendJob())
        if self.phase is AttemptPhase.ENDED and self.result is not None:
            again, self._was_signalled_late = self._was_signalled_late, True
            return self._do(do.EndWaits(0.0 if again else LATE_SIGNAL_DELAY_S))
        if from_terminal and not self._interrupted and self._inspect_key.record_press(number, now.mono):
            return self._do(do.InspectRanks())
        self._do(do.Emit(events.SignalReceived(number)))
        if number == self._preempt_signal and not (reason or (self._notice_sent and number in STOP_SIGNALS)):
            self._notice_sent = True
            return self._send(messages.PreemptionNotice(number))
        # A second SIGTERM does not shorten the grace: Slurm sends it when the grace of a preempted job begins and ends.
        again = self._interrupted and number in (signal.SIGINT, signal.SIGQUIT)
        first, self._interrupted = not self._interrupted, True
        request = messages.StopRequested(number, again, reason)
        self._stop_before_order(request, first, now)
        self._send(request)

    def _stop_before_order(self, request: messages.StopRequested, first: bool, now: Now) -> None:
        """Begin to stop the ranks before node 0 orders it: node 0 may be out of reach."""
        attempt = self.attempt
        if first and self.phase not in RUNNING_PHASES and _must_name_cause(request):
            why = request.reason or signal_name(request.signal)
            self._do(do.ShowNote(f"{why}: stopping; no rank runs here", of_job=True))
        if self.phase is AttemptPhase.SWEEPING:
            self._do(do.Sweep(0))
        elif self.phase in RUNNING_PHASES and request.again:
            self._sweep(0, now)
        elif self.phase in RUNNING_PHASES:
            if first:
                self._cancel_spawns()
                count = format_count(len(attempt.live) + len(attempt.in_flight), "rank")
                self._do(do.ShowNote(_describe_stop_request(request, count), of_job=True))
            if not (self._inspects_before_stop and self.phase is AttemptPhase.RUNNING):
                self._stop_ranks(request.signal, self._grace_s, now)
            elif (late := StopOrderLate(request.signal)) not in attempt.deadlines:
                attempt.deadlines.set(late, now.mono + STOP_ORDER_TIMEOUT_S)

    def _on_zygote_signalled(self, signalled: ev.ZygoteSignalled, now: Now) -> None:
        number, rank = signalled.number, signalled.rank
        if rank is None:
            self._group_signals.record(number, now.mono)
        elif self.phase is AttemptPhase.RUNNING and not self._interrupted:
            self._on_signal(number, now, reason=f"rank {rank} sent {signal_name(number)} to its parent process")

    def _on_deadline(self, deadline: Deadline, now: Now) -> None:
        match deadline:
            case GraceOver() if self.phase in RUNNING_PHASES:
                self._sweep(0, now)
            case SigtermDue() if self.phase in RUNNING_PHASES and signal.SIGTERM not in self.attempt.stop_signals:
                self.attempt.stop_signals.add(signal.SIGTERM)
                self._do(do.StopRanks(signal.SIGTERM))
            case StopOrderLate(number=number):
                self._stop_ranks(number, self._grace_s, now)
            case SweepLate():
                self._do(do.KillZygote())
            case DrainLate():
                self._collect_output()
            case ForwardRequestDue(number=number):
                self._send(messages.ForwardSignal(number, self._group_signals.was_seen(number, now.mono)))
            case ForwardDue(number=number):
                if not self._group_signals.consume(number, now.mono):
                    self._do(do.SignalRanks(number))
            case PreemptSignalDue(number=number) if deadline.attempt == self.attempt.number:
                self._do(do.NotePreemptionHandlers(number))
                if not self._group_signals.consume(number, now.mono):
                    self._do(do.SignalRanks(number, deadline.only_handlers))


def _must_name_cause(request: messages.StopRequested) -> bool:
    """Whether the message on a stop must say what requested it: always except for Ctrl-C."""
    return bool(request.reason) or request.signal != signal.SIGINT


def _describe_stop_request(request: messages.StopRequested, ranks: str) -> str:
    if _must_name_cause(request):
        return f"{request.reason or signal_name(request.signal)}: stopping {ranks}"
    return f"stopping {ranks}; Ctrl-C again kills them now"
