"""The decisions of one node, as a pure state machine: an event goes in, the commands that follow from it come out.

It reads no clock, file, socket or process, and nothing calls it back: ``NodeRunner`` gives it events with their time,
and executes its commands. A command that is a question is answered by an event, which comes before any other event.
The rules:

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
- SWEEPING: the zygote kills all its descendants. One that does not answer is killed, and by that its ranks.
- DRAINING: no process is left. What the ranks printed is read, at most for a second. Then the attempt is reported, or
  the job ends here if node 0 has ended it.
- A lost zygote has taken its ranks with it: those that recorded an exception have failed. The next attempt has a new
  zygote.
- ENDED: a further signal ends the launcher, unless a feature is stopping something of its own.

Which phase may follow which: ``ATTEMPT_PHASE_TRANSITIONS``, which is asserted.
"""

from __future__ import annotations

import signal
from collections import deque

from ddplaunch.base.errors import EXIT_OS, EXIT_PREEMPTED
from ddplaunch.base.text import format_count, signal_name
from ddplaunch.core import events, messages
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import JobResult, describe_exit
from ddplaunch.core.machine import Machine, MachineEvent
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.node_attempt import (
    RUNNING_PHASES,
    AttemptPhase,
    DrainLate,
    ForwardDue,
    ForwardRequestDue,
    GraceOver,
    LiveRank,
    NodeAttempt,
    PreemptSignalDue,
    SigtermDue,
    StopOrderLate,
    SweepLate,
)
from ddplaunch.core.node.signals import BroadcastSignalFilter, InspectKey
from ddplaunch.core.signals import DUPLICATE_WINDOW_S, STOP_SIGNALS
from ddplaunch.system.processes import proc_utils

MAX_IN_FLIGHT = 8  # ranks requested and not spawned yet: each has up to six descriptors in the socket
SIGINT_TIMEOUT_S = 3.0  # between SIGINT and SIGTERM: a wait inside torch does not react to SIGINT
STOP_ORDER_TIMEOUT_S = 1.5  # for node 0 to order a stop: it may ask all nodes for something before
DRAIN_TIMEOUT_S = 1.0  # for output after all ranks are dead: a process that cannot be killed may hold a pipe open
LEFTOVER_GRACE_S = 5.0  # at most between SIGTERM and SIGKILL for leftover processes of ranks that succeeded
ZYGOTE_REPORT_DELAY_S = 1.0  # after a signal, until the zygote has reported whether it got it too


class NodeMachine(Machine):
    """Carries out an attempt after the other on one node, until the job ends."""

    def __init__(
        self, *, grace_s: float, inspects_before_stop: bool, preempt_signal: int | None, preempt_forward: int | None
    ) -> None:
        """``inspects_before_stop``: node 0 asks all nodes for something before it orders a stop.

        ``preempt_signal``: the scheduler's notice; ``preempt_forward``: the signal that all ranks get then, if any.
        """
        super().__init__()
        self._grace_s, self._inspects_before_stop = grace_s, inspects_before_stop
        self._preempt_signal, self._preempt_forward = preempt_signal, preempt_forward
        self.attempt = NodeAttempt()
        self.result: JobResult | None = None  # set once node 0 has ended the job
        self._zygote_ready = False
        self._cannot_start = False  # the log cannot be opened: node 0 knows, and will end the job
        self._interrupted = False  # a stop was requested on this node
        self._is_preempted = self._preemption_seen = self._notice_sent = False
        self._inspect_key = InspectKey()
        self._group_signals = BroadcastSignalFilter()  # those that the ranks have got too: not to be forwarded again
        self._deadlines: Deadlines[Deadline] = Deadlines()  # those of signals, which outlive an attempt

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
                    self._on_deadline(due, now)

    @property
    def phase(self) -> AttemptPhase:
        return self.attempt.phase

    def wake_at(self) -> float | None:
        """When the next deadline is due, on the monotonic clock; None without one."""
        moments = [at for at in (self.attempt.deadlines.next, self._deadlines.next) if at is not None]
        return min(moments, default=None)

    def _send(self, message: messages.FromNode) -> None:
        """Send a control message to node 0."""
        self._do(do.Send(0, message))

    # ------------------------------------------------------------------------------------------ messages of node 0

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
                self._do(do.ReportJob())
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

    # -------------------------------------------------------------------------------------------- start of the ranks

    def _on_prepared(self, prepared: ev.AttemptPrepared) -> None:
        attempt, self._zygote_ready = self.attempt, prepared.zygote_ready
        attempt.ranks = {rank.rank: rank for rank in prepared.ranks}
        attempt.pending = deque(attempt.ranks)
        attempt.set_phase(AttemptPhase.RUNNING if self._zygote_ready else AttemptPhase.LOADING)
        self._do(do.OpenStore(), do.BeginAttempt())
        self._spawn_next()

    def _on_zygote_started(self) -> None:
        self._zygote_ready = True
        if self.phase is AttemptPhase.LOADING:
            self.attempt.set_phase(AttemptPhase.RUNNING)
            self._do(do.OpenStore())  # again: now it is known whether the zygote can serve it
            self._spawn_next()

    def _spawn_next(self) -> None:
        attempt = self.attempt
        while self._zygote_ready and attempt.pending and len(attempt.in_flight) < MAX_IN_FLIGHT:
            rank = attempt.pending.popleft()
            attempt.in_flight.add(rank)
            self._do(do.SpawnRank(rank))

    def _on_spawned(self, spawned: ev.ProcessSpawned) -> None:
        attempt, rank = self.attempt, spawned.rank
        attempt.in_flight.discard(rank)
        attempt.live[rank] = LiveRank(spawned.pid)
        attempt.spawned_count += 1
        self._do(do.Emit(events.RankStarted(rank, spawned.pid, attempt.number)))
        if attempt.spawned_count == 1:
            self._send(messages.RanksStarted(attempt.number))
        if self._is_preempted:
            self._do(do.CreatePreemptionFile(report_error=False))  # its folder exists only since the zygote is ready
        if self.phase in (AttemptPhase.STOPPING, AttemptPhase.SWEEPING):
            attempt.live[rank].stop_requested = True
            self._do(do.StopRank(rank))
        self._spawn_next()

    def _on_spawn_failed(self, failed: ev.SpawnFailed, now: Now) -> None:
        """Report the first rank that cannot be started; the others of this attempt are not started either."""
        attempt, rank = self.attempt, failed.rank
        attempt.in_flight.discard(rank)
        self._cancel_spawns()
        self._do(do.Emit(events.RankStartFailed(rank, failed.errno, attempt.number)))
        if not any(failure.pid == 0 for failure in attempt.failures):
            total, count = len(attempt.ranks), attempt.spawned_count
            before = f"; {count} of {total} ranks had been started here" if total > 1 else ""
            text = f"rank {rank} could not be started: {failed.reason}{before}"
            attempt.explaining.add(rank)
            self._do(do.ExplainEnd(attempt.make_failure(rank, 0, EXIT_OS, now.wall, text)))
        self._continue(now)

    def _cancel_spawns(self) -> None:
        """Start no further rank; those that the zygote is starting get a signal to end once they have started."""
        self.attempt.pending.clear()
        if self.attempt.in_flight:
            self._do(do.WithdrawSpawns())

    # ---------------------------------------------------------------------------------------------- end of the ranks

    def _on_exited(self, exited: ev.ProcessExited, now: Now) -> None:
        attempt, rank, code = self.attempt, exited.rank, exited.code
        if rank not in attempt.live or attempt.live[rank].pid != exited.pid:
            return  # of an earlier attempt, where it could not be killed
        was_stopped = attempt.live.pop(rank).stop_requested
        self._do(do.Emit(events.RankExited(rank, exited.pid, code, attempt.number, *exited.usage)))
        if code == EXIT_PREEMPTED and self._is_preempted:
            self._preemption_seen = True
        elif code != 0:
            self._explain_end(rank, exited.pid, code, now, peak=exited.usage[0], stopped=was_stopped)
        self._continue(now)

    def _explain_end(self, rank: int, pid: int, code: int, now: Now, *, peak: int = 0, stopped: bool) -> None:
        """Ask why a rank has ended. Of a stopped rank, an exception came first; the signal interrupted its cleanup."""
        self.attempt.explaining.add(rank)
        failure = self.attempt.make_failure(rank, pid, 1 if stopped else code, now.wall)
        self._do(do.ExplainEnd(failure, peak, stopped))

    def _on_end_explained(self, explained: ev.EndExplained, now: Now) -> None:
        attempt = self.attempt
        attempt.explaining.discard(explained.rank)
        if explained.failure is None:
            attempt.stopped_count += 1
        else:
            attempt.failures.append(explained.failure)
            self._send(messages.FailureReported(attempt.number, explained.failure, now.wall))
        self._continue(now)

    def _on_store_exited(self, how: str, now: Now) -> None:
        """The ranks cannot continue without their store."""
        if self.phase in RUNNING_PHASES:
            self.attempt.set_launcher_failure(how, now.wall)
            self._sweep(0, now)
        else:
            self._do(do.ShowNote(how))

    def _on_zygote_lost(self, how: str | None, now: Now) -> None:
        attempt = self.attempt
        if self.phase in (AttemptPhase.LOADING, *RUNNING_PHASES, AttemptPhase.SWEEPING):
            if how is not None:
                attempt.set_launcher_failure(how, now.wall)
            attempt.pending.clear()
            attempt.in_flight.clear()
            self._do(do.KillRemaining())
        # In other phases nothing is lost: the next attempt starts a zygote of its own.

    def _on_remaining_killed(self, stuck: tuple[str, ...], now: Now) -> None:
        """The ranks ended with their zygote; those that had recorded an exception have failed."""
        attempt, attempt.unkillable = self.attempt, stuck
        ended, attempt.live = attempt.live, {}
        for rank, process in ended.items():
            self._explain_end(rank, process.pid, -signal.SIGKILL, now, stopped=True)
        self._continue(now)

    def _continue(self, now: Now) -> None:
        """End the attempt if no rank is left; report it if all have succeeded, and end leftover processes."""
        attempt = self.attempt
        if not attempt.is_idle:
            return
        if attempt.unkillable is not None and self.phase is not AttemptPhase.DRAINING:
            self._drain((), attempt.unkillable, now)
        elif self.phase in RUNNING_PHASES:
            have_all_run = attempt.spawned_count == len(attempt.ranks)
            succeeded = self.phase is AttemptPhase.RUNNING and not attempt.failures and have_all_run
            if succeeded:
                self._send(messages.RanksFinished(attempt.number))
            self._sweep(min(LEFTOVER_GRACE_S, self._grace_s) if succeeded else 0, now)

    # -------------------------------------------------------------------------------------------------- stop and end

    def _stop_ranks(self, number: int, grace_s: float, now: Now) -> None:
        """Send a stop signal to the ranks, not to their process groups, and once.

        A DataLoader's workers must live while a checkpoint is written.
        """
        attempt = self.attempt
        if number in attempt.stop_signals or self.phase not in RUNNING_PHASES:
            return
        self._cancel_spawns()
        if self.phase is AttemptPhase.RUNNING:
            attempt.set_phase(AttemptPhase.STOPPING)
            attempt.deadlines.set(GraceOver(), now.mono + grace_s)
        attempt.stop_signals.add(number)
        if number != signal.SIGTERM and SigtermDue() not in attempt.deadlines:
            attempt.deadlines.set(SigtermDue(), now.mono + SIGINT_TIMEOUT_S)
        self._do(do.StopRanks(number, spare_failing=not self._interrupted))

    def _sweep(self, grace_s: float, now: Now) -> None:
        """Kill all processes that are left, with ``grace_s`` seconds between SIGTERM and SIGKILL."""
        attempt = self.attempt
        attempt.set_phase(AttemptPhase.SWEEPING)
        for rank in attempt.live.values():  # their ends are no failures, unless an exception came before
            rank.stop_requested = True
        self._cancel_spawns()
        attempt.deadlines.set(SweepLate(), now.mono + grace_s + proc_utils.KILL_TIMEOUT_S + 1)
        self._do(do.Sweep(grace_s))

    def _end_loading(self, now: Now) -> None:
        """End a zygote that is still importing: it has no ranks yet, and there may be no further attempt."""
        self.attempt.pending.clear()
        self._do(do.CloseZygote())
        self._drain((), (), now)

    def _drain(self, found: tuple[str, ...], stuck: tuple[str, ...], now: Now) -> None:
        """No process of the attempt is left, but those in ``stuck``, which cannot be killed."""
        attempt = self.attempt
        attempt.deadlines.cancel()
        if found and not (attempt.failures or attempt.stopped_count or self._interrupted):
            self._do(do.ShowNote(f"killed leftover processes of the ranks: {', '.join(found)}"))
        if stuck:
            self._do(do.ShowNote(f"not waiting for processes that cannot be killed: {', '.join(stuck)}"))
        attempt.stopped_count += len(attempt.live)
        attempt.live.clear()
        attempt.in_flight.clear()
        attempt.set_phase(AttemptPhase.DRAINING)
        attempt.deadlines.set(DrainLate(), now.mono + DRAIN_TIMEOUT_S)
        self._do(do.Emit(events.AttemptSwept(found, stuck)), do.DrainOutput())

    def _collect_output(self) -> None:
        self.attempt.deadlines.cancel()
        self._do(do.CollectOutput())

    def _on_output_collected(self, output: ev.OutputCollected, now: Now) -> None:
        """Report the attempt, or end with the job."""
        if self.result is not None:
            return self._end_job()
        attempt = self.attempt
        attempt.set_phase(AttemptPhase.WAITING)
        seen = self._preemption_seen or output.preemption_seen
        report = (attempt.number, attempt.stopped_count, now.wall, attempt.launcher_failure, seen, output.tails)
        self._send(messages.AttemptReport(*report))

    def _end_job(self) -> None:
        assert self.result is not None
        self.attempt.set_phase(AttemptPhase.ENDED)
        self._deadlines.cancel()
        self._do(do.Emit(events.JobEnded(self.result.code, self.result.verdict, self.result.remark)))

    # -------------------------------------------------------------------------------------------- signals, deadlines

    def _on_signal(self, number: int, now: Now, *, reason: str = "", from_terminal: bool = False) -> None:
        """Handle one of ``STOP_SIGNALS``; ``reason``: set if a rank or a command requested the stop instead."""
        if number == signal.SIGTSTP:
            return self._do(do.SuspendJob())
        if self.phase is AttemptPhase.ENDED and self.result is not None:
            return self._do(do.ExitNow(self.result.code))
        if from_terminal and not self._interrupted and self._inspect_key.is_pressed(number, now.mono):
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
        """Begin to stop the ranks before node 0 orders it, which may be out of reach."""
        attempt = self.attempt
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


def _describe_stop_request(request: messages.StopRequested, ranks: str) -> str:
    """Describe a stop request; the reason or signal is named unless it was Ctrl-C."""
    if request.reason or request.signal != signal.SIGINT:
        return f"{request.reason or signal_name(request.signal)}: stopping {ranks}"
    return f"stopping {ranks}; Ctrl-C again kills them now"
