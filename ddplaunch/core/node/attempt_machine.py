"""The decisions on one attempt on a node: the start of its ranks, their ends, and the stop of those that are left.

``machine.py`` has the rules, and decides on messages and signals.
"""

from __future__ import annotations

import signal
from collections import deque

from ddplaunch.base.errors import EXIT_OS, EXIT_PREEMPTED
from ddplaunch.core import events, messages
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import JobResult
from ddplaunch.core.machine import Machine
from ddplaunch.core.node import commands as do
from ddplaunch.core.node import node_events as ev
from ddplaunch.core.node.node_attempt import (
    RUNNING_PHASES,
    AttemptPhase,
    AttemptStep,
    AttemptView,
    DrainLate,
    GraceOver,
    LiveRank,
    NodeAttempt,
    SigtermDue,
    SweepLate,
)
from ddplaunch.system.processes import proc_utils

MAX_IN_FLIGHT = 8  # ranks requested and not spawned yet: each has up to six descriptors in the socket
SIGINT_TIMEOUT_S = 3.0  # between SIGINT and SIGTERM: a wait inside torch does not react to SIGINT
DRAIN_TIMEOUT_S = 1.0  # for output after all ranks are dead: a process that cannot be killed may hold a pipe open
LEFTOVER_GRACE_S = 5.0  # at most between SIGTERM and SIGKILL for leftover processes of ranks that succeeded


class AttemptMachine(Machine):
    """The part of ``NodeMachine`` that handles the attempts, one after the other."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s
        self.attempt = NodeAttempt()
        self.result: JobResult | None = None  # set once node 0 has ended the job
        self._zygote_ready = False
        self._interrupted = False  # a stop was requested on this node
        self._is_preempted = self._preemption_seen = False
        self._deadlines: Deadlines[Deadline] = Deadlines()  # those of signals, which outlive an attempt

    @property
    def phase(self) -> AttemptPhase:
        return self.attempt.phase

    @property
    def view(self) -> AttemptView:
        """A read-only view of the attempt, for other code."""
        return AttemptView(self.attempt)

    def _send(self, message: messages.FromNode) -> None:
        """Send a control message to node 0."""
        self._do(do.Send(0, message))

    # ----------------------------------------------------------------------------------------------- start of the ranks

    def _on_prepared(self, prepared: ev.AttemptPrepared) -> None:
        attempt, self._zygote_ready = self.attempt, prepared.zygote_ready
        attempt.ranks = {rank.rank: rank for rank in prepared.ranks}
        attempt.pending = deque(attempt.ranks)
        attempt.take_step(AttemptStep.RUN if self._zygote_ready else AttemptStep.LOAD)
        self._do(do.OpenStore(), do.BeginAttempt())
        self._spawn_next()

    def _on_zygote_started(self) -> None:
        self._zygote_ready = True
        if self.phase is AttemptPhase.LOADING:
            self.attempt.take_step(AttemptStep.RUN)
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

    # ------------------------------------------------------------------------------------------------- end of the ranks

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
        """Request the cause of a rank's end. An exception that a stopped rank recorded came before the signal."""
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
        """Called when the store's process has ended: kill the running ranks, which cannot continue without it."""
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
        """Called when the ranks were killed with their zygote: find out which of them had failed before."""
        attempt, attempt.unkillable = self.attempt, stuck
        ended, attempt.live = attempt.live, {}
        for rank, process in ended.items():
            self._explain_end(rank, process.pid, -signal.SIGKILL, now, stopped=True)
        self._continue(now)

    def _continue(self, now: Now) -> None:
        """End the attempt if no rank is left: report if all ranks have succeeded, and end leftover processes."""
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

    # ----------------------------------------------------------------------------------------------------- stop and end

    def _stop_ranks(self, number: int, grace_s: float, now: Now) -> None:
        """Send a stop signal once to each rank, not to its process group.

        A DataLoader's workers must live while a checkpoint is written.
        """
        attempt = self.attempt
        if number in attempt.stop_signals or self.phase not in RUNNING_PHASES:
            return
        self._cancel_spawns()
        if self.phase is AttemptPhase.RUNNING:
            attempt.deadlines.set(GraceOver(), now.mono + grace_s)
        attempt.take_step(AttemptStep.STOP)
        attempt.stop_signals.add(number)
        if number != signal.SIGTERM and SigtermDue() not in attempt.deadlines:
            attempt.deadlines.set(SigtermDue(), now.mono + SIGINT_TIMEOUT_S)
        self._do(do.StopRanks(number, spare_failing=not self._interrupted))

    def _sweep(self, grace_s: float, now: Now) -> None:
        """Kill all processes that are left, with ``grace_s`` seconds between SIGTERM and SIGKILL."""
        attempt = self.attempt
        attempt.take_step(AttemptStep.SWEEP)
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

    def _drain(self, leftovers: tuple[str, ...], stuck: tuple[str, ...], now: Now) -> None:
        """Begin to read the last output: no process of the attempt is left except ``stuck``, which cannot be killed."""
        attempt = self.attempt
        attempt.deadlines.cancel()
        if leftovers and not (attempt.failures or attempt.stopped_count or self._interrupted):
            self._do(do.ShowNote(f"killed leftover processes of the ranks: {', '.join(leftovers)}"))
        if stuck:
            self._do(do.ShowNote(f"not waiting for processes that cannot be killed: {', '.join(stuck)}"))
        attempt.stopped_count += len(attempt.live)
        attempt.live.clear()
        attempt.in_flight.clear()
        attempt.take_step(AttemptStep.DRAIN)
        attempt.deadlines.set(DrainLate(), now.mono + DRAIN_TIMEOUT_S)
        self._do(do.Emit(events.AttemptSwept(leftovers, stuck)), do.DrainOutput())

    def _collect_output(self) -> None:
        self.attempt.deadlines.cancel()
        self._do(do.CollectOutput(tuple(failure.rank for failure in self.attempt.failures)))

    def _on_output_collected(self, output: ev.OutputCollected, now: Now) -> None:
        """Send the AttemptReport; if the job has its result already, end it on this node."""
        if self.result is not None:
            return self._end_job()
        attempt = self.attempt
        attempt.take_step(AttemptStep.REPORT)
        seen = self._preemption_seen or output.preemption_seen
        report = (attempt.number, attempt.stopped_count, now.wall, attempt.launcher_failure, seen, output.tails)
        self._send(messages.AttemptReport(*report))

    def _end_job(self) -> None:
        assert self.result is not None
        self.attempt.take_step(AttemptStep.END)
        self._deadlines.cancel()
        self._do(do.Emit(events.JobEnded(self.result.code, self.result.verdict, self.result.remark)))
