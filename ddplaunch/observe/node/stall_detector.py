"""Stall detection on one node: inspects ranks that have printed nothing for long, and may report a suspected stall.

Output of a rank resets the timer, at no cost and without a wake-up. So does the end of a rank: the rank may have done
what the others waited for just before, and after they were inspected. The timer expires after 20 s without output, and
again each time that this time has doubled, up to the stall timeout. Ranks that wait for others are inspected twice, to
see what they do in between. Ranks that print all the time are inspected every 5 minutes. Node 0 decides whether the job
has stalled: it inspects the ranks of all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core import events
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import FromNode, ProgressResumed
from ddplaunch.core.node.node_attempt import AttemptPhase
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import may_wait
from ddplaunch.observe.diagnosis.stall_check import may_be_busy
from ddplaunch.observe.messages import StallSuspected
from ddplaunch.observe.node.tree_usage import TreeUsage, read_tree_usage, withheld_cpu_s
from ddplaunch.observe.options import EARLY_STALL_CHECK_S, LONG_WAIT, Hangs

RECHECK_DELAY_S = 4.0  # between two inspections, before the stall timeout
MAX_WAKE_DELAY_S = 2.0  # a timer that is later: the launcher was stopped, with all ranks (Ctrl-Z, a frozen container)
CLOCK_JUMP_S = 1.0  # a larger change of wall clock minus monotonic clock: it was set, or the machine was suspended
BUSY_WAIT_S = 60.0  # after such a wait for a busy rank, node 0 begins to watch where that one is
CPU_NOISE_S = 0.02  # CPU time that inspections may cost a rank, and the kernel's rounding

InspectRanks = Callable[["NodeRanks", Callable[["Inspection"], None]], None]


class _UsageSnapshot(Struct, frozen=True):
    """What the ranks had used at one moment: CPU time, bytes of files and of the network."""

    moment: float
    usage: dict[int, TreeUsage]  # by pid, without the replies to inspections


class StallDetector:
    """The stall detector of one node, for all attempts."""

    def __init__(
        self,
        loop: EventLoop,
        hangs: Hangs,
        inspect: InspectRanks,
        send: Callable[[FromNode], None],
        note: Callable[[str], None],
    ) -> None:
        """``inspect`` finds the state of this node's ranks; ``send`` sends to node 0; ``note`` shows a message."""
        self._loop, self._inspect, self._send = IsolatedLoop(loop, "stall detection", note), inspect, send
        self._timeout, self._strict = hangs.stall_timeout_s, hangs.is_strict
        doubled = [EARLY_STALL_CHECK_S * 2**times for times in range(10)]
        last = hangs.stall_timeout_s - hangs.stall_check_interval_s
        self._checks = [
            *((each, RECHECK_DELAY_S) for each in doubled if each + RECHECK_DELAY_S < last),
            (last, hangs.stall_check_interval_s),
        ]
        self._next = 0  # index of the next check: (seconds without output, seconds until the second inspection)
        self._ranks: NodeRanks | None = None
        self._timer: Timer | None = None
        self._printed: dict[int, float] = {}
        self._snapshots: list[_UsageSnapshot] = []  # the last two
        self._since: dict[int, tuple[object, float]] = {}  # by rank: its collectives, and since when they are unchanged
        self._was_waiting = False  # whether ranks were waiting in the first of two inspections
        self._stalled = False  # whether node 0 has reported a stall
        self._noisy = False  # whether ranks printed during the stall, so that output does not count as progress
        self._inspected = 0.0
        self._min_interval_s = min(EARLY_STALL_CHECK_S, self._timeout)  # between two inspections, while ranks print
        self._noisy_check_at = 0.0  # when ranks that print all the time are inspected next
        self._offset = 0.0
        self._clock_set = 0.0  # when the wall clock was last set, by itself
        guard = self._loop.guard  # an exception of the detector must not end the job
        self.start_attempt: Callable[[NodeRanks], None] = guard(self._begin)
        self.reset: Callable[[], None] = guard(self._restart)
        self.on_output: Callable[[int], None] = guard(self._on_printed)
        self.observe: Callable[[events.Event], None] = guard(self._on_event)

    def _begin(self, ranks: NodeRanks) -> None:
        """Start watching a new attempt."""
        self.stop()
        self._ranks = ranks
        self._offset = time.time() - time.monotonic()
        self._inspected = time.monotonic() - self._timeout
        self._noisy_check_at = time.monotonic() + LONG_WAIT / 2
        self._timer = self._loop.call_later(self._checks[0][0], self._on_timer)
        self._restart()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ranks = self._timer = None
        self._printed.clear()
        self._stalled = self._noisy = False

    def _on_event(self, event: events.Event) -> None:
        if isinstance(event, events.RankExited) and event.rank in self._printed:
            self._on_rank_activity(event.rank)
        elif isinstance(event, events.JobStalled | events.StallEnded):
            self._stalled = isinstance(event, events.JobStalled)
            last = max(self._printed.values(), default=0.0)
            self._noisy = (
                self._stalled and time.monotonic() - last < self._min_interval_s / 2 and self._ranks is not None
            )
            if self._noisy:
                self._noisy_check_at = time.monotonic() + EARLY_STALL_CHECK_S

    def _restart(self) -> None:
        """Discard all measurements: at the start of an attempt, or after the launcher itself was stopped."""
        self._snapshots.clear()
        self._since.clear()
        if self._ranks is not None:
            for rank in self._ranks.plan.local_ranks:
                self._on_rank_activity(rank.rank)

    def _on_printed(self, rank: int) -> None:
        self._on_rank_activity(rank)
        if self._stalled and not self._noisy:
            self._on_progress()

    def _on_progress(self) -> None:
        """Called when a rank has printed or entered another collective: after a stall, report that to node 0."""
        if self._stalled and self._ranks is not None:
            self._stalled = self._noisy = False
            self._send(ProgressResumed(self._ranks.number))

    def _on_rank_activity(self, rank: int) -> None:
        now = self._printed[rank] = time.monotonic()
        self._next, self._was_waiting = 0, False
        if self._timer is not None:
            quiet = max(now + self._checks[0][0], self._inspected + self._min_interval_s)
            self._timer.when = max(now, min(quiet, self._noisy_check_at))

    def _silence_s(self, ranks: NodeRanks) -> float:
        """Seconds since a rank last printed something or called ``runtime.working``."""
        for number, printed in self._printed.items():
            self._printed[number] = max(printed, ranks.last_keep_alive_at(number))
        return time.monotonic() - max(self._printed.values(), default=0.0)

    def _on_timer(self) -> None:
        ranks, due = self._ranks, self._timer.when if self._timer else 0.0
        if ranks is None or ranks.attempt.phase not in (AttemptPhase.LOADING, AttemptPhase.RUNNING):
            return
        if time.monotonic() - due > max(MAX_WAKE_DELAY_S, self._checks[self._next][1]):
            self._restart()
            return self._schedule(self._checks[0][0])
        rest = self._checks[self._next][0] - self._silence_s(ranks)
        left = self._noisy_check_at - time.monotonic()
        if rest > 0 and left > 0:
            self._timer = self._loop.call_later(min(rest, left), self._on_timer)
            return
        for channel in ranks.channels.values():
            channel.read_pending()
        if not any(channel.has_thread for channel in ranks.channels.values()):
            return self._schedule_next(ranks)  # no rank has called init_process_group
        self._inspect(
            ranks, self._loop.guard(partial(self._on_inspected if rest <= 0 else self._on_noisy_inspection, ranks))
        )

    def _schedule(self, seconds: float) -> None:
        self._inspected = time.monotonic()
        self._noisy_check_at = self._inspected + (EARLY_STALL_CHECK_S if self._noisy else LONG_WAIT / 2)
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _schedule_next(self, ranks: NodeRanks) -> None:
        """Schedule the next check: at twice the time without output; after the stall timeout, once per interval."""
        self._was_waiting = False
        if self._next == len(self._checks) - 1:
            return self._schedule(self._timeout)
        self._next += 1
        self._schedule(max(0.0, self._checks[self._next][0] - self._silence_s(ranks)))

    def _on_inspected(self, ranks: NodeRanks, inspection: Inspection) -> None:
        if ranks is not self._ranks or ranks.attempt.phase is not AttemptPhase.RUNNING:
            return
        pause = self._checks[self._next][1]
        inspection = self._add_measurements(inspection, ranks, keep=True)
        waiting = [rank for rank in inspection.ranks if self._may_wait(rank, ranks)]
        still = all((rank.standstill or 0.0) >= pause / 2 for rank in inspection.ranks)
        if not waiting and not (self._strict and self._next == len(self._checks) - 1):
            return self._schedule_next(ranks)
        if not self._was_waiting:  # nothing to compare with yet
            self._was_waiting = True
            return self._schedule(pause)
        is_awaited_busy = any(may_be_busy(rank) for rank in inspection.ranks if rank not in waiting)
        lasted = min((rank.standstill or 0.0 for rank in waiting), default=0.0)
        if still and (lasted >= BUSY_WAIT_S or not is_awaited_busy):
            self._send(StallSuspected(ranks.number))
        self._schedule_next(ranks)

    def _on_noisy_inspection(self, ranks: NodeRanks, inspection: Inspection) -> None:
        """Called after an inspection of ranks that print: report one that has waited for many minutes to node 0."""
        if ranks is not self._ranks or ranks.attempt.phase is not AttemptPhase.RUNNING:
            return
        inspection = self._add_measurements(inspection, ranks, keep=True)
        waiting = [rank for rank in inspection.ranks if self._may_wait(rank, ranks)]
        kept_alive = max(map(ranks.last_keep_alive_at, self._printed), default=0.0)  # counts, unlike output
        long = any((rank.standstill or 0.0) >= LONG_WAIT / 2 - MAX_WAKE_DELAY_S for rank in waiting)
        if long and time.monotonic() - kept_alive > LONG_WAIT / 2:
            self._send(StallSuspected(ranks.number))
        self._schedule(self._checks[0][0])

    def _may_wait(self, rank: RankInspection, ranks: NodeRanks) -> bool:
        """Whether a rank waits for others, or may be in ``init_process_group``."""
        begins = rank.answers is None and rank.rank in ranks.channels and ranks.channels[rank.rank].has_thread
        return begins or may_wait(rank)

    # ---------------------------------------------------------------------------------------- what only this node knows

    def wrap_inspection_callback(
        self, ranks: NodeRanks | None, done: Callable[[Inspection], None]
    ) -> Callable[[Inspection], None]:
        """Wrap the callback of another inspection: also record since when the ranks' collectives are unchanged."""

        def record_progress(inspection: Inspection) -> None:
            if ranks is not None and ranks is self._ranks:
                for rank in inspection.ranks:
                    self._time_since_progress(rank, time.monotonic())

        def on_inspected(inspection: Inspection) -> None:
            self._loop.guard(record_progress)(inspection)
            done(inspection)

        return on_inspected

    def add_idle_times(self, inspection: Inspection, ranks: NodeRanks) -> Inspection:
        """Add idle times and usage of this node's ranks to an inspection; after an exception, return it unchanged."""
        found = [inspection]
        if ranks is self._ranks:
            self._loop.guard(lambda: found.append(self._add_measurements(inspection, ranks)))()
        return found[-1]

    def _add_measurements(self, inspection: Inspection, ranks: NodeRanks, *, keep: bool = False) -> Inspection:
        """Add times without output, times without progress and usage to an inspection; ``keep`` stores the usage."""
        self._check_wall_clock()
        self._silence_s(ranks)
        moment = time.monotonic()
        apart = self._checks[0][1] / 2
        before = next((each for each in self._snapshots[::-1] if moment - each.moment > apart), None)
        # With thousands of sockets this takes long: not for a user's request without an earlier snapshot to compare.
        snapshot = self._read_usage(ranks) if keep or before else _UsageSnapshot(moment, {})
        measured = []
        for rank in inspection.ranks:
            printed = self._printed.get(rank.rank)
            quiet = None if printed is None else snapshot.moment - printed
            if rank.condition is ProcessCondition.EXITED and rank.rank in ranks.processes:
                quiet = 0.0  # its end is not noticed yet
            busy, traffic, network = _usage_rates(rank.pid, before, snapshot)
            still = self._time_since_progress(rank, snapshot.moment)
            measured.append(replace(rank, quiet=quiet, standstill=still, busy=busy, traffic=traffic, network=network))
        if keep:
            self._snapshots = [*self._snapshots[-1:], snapshot]
        return replace(inspection, ranks=tuple(measured))

    def _read_usage(self, ranks: NodeRanks) -> _UsageSnapshot:
        """Read what the ranks have used, without the bytes of their replies to inspections."""

        taken = {
            process.pid: ranks.channels[rank].bytes_received
            for rank, process in ranks.processes.items()
            if rank in ranks.channels
        }
        found = read_tree_usage([process.pid for process in ranks.processes.values()], ranks.plan.master_port)
        usage = {
            pid: used._replace(bytes_transferred=used.bytes_transferred - taken.get(pid, 0))
            for pid, used in found.items()
        }
        return _UsageSnapshot(time.monotonic(), usage)

    def _time_since_progress(self, rank: RankInspection, now: float) -> float:
        """Seconds since a rank's collectives were seen to change, or since it entered the last if that is longer."""
        known, since = self._since.setdefault(rank.rank, (rank.groups, now))
        if known != rank.groups and rank.answers is not False:  # a rank that does not reply may not have moved
            since = now
            self._since[rank.rank] = rank.groups, now
            self._on_progress()
        seen = now - since
        last = max((each.entered for each in rank.last), default=0.0)
        return max(seen, time.time() - last) if last > self._clock_set else seen

    def _check_wall_clock(self) -> None:
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset) > CLOCK_JUMP_S:
            self._offset, self._clock_set = offset, time.time()


def _usage_rates(
    pid: int, before: _UsageSnapshot | None, now: _UsageSnapshot
) -> tuple[float | None, float | None, float | None]:
    """Return CPUs in use, and bytes per second of files and of the network, between two snapshots of a process.

    A process that is ready to run is not idle: on a machine with load, the CPU time that it would have used counts too.
    None without two snapshots, or where a process in between ended unseen.
    """
    if before is None or pid not in now.usage:
        return None, None, None
    first, last = before.usage.get(pid), now.usage[pid]
    if first is None or last.cpu_s < first.cpu_s - CPU_NOISE_S:
        return None, None, None
    seconds = now.moment - before.moment
    noise_s = CPU_NOISE_S if seconds < RECHECK_DELAY_S else 0.0  # in a longer time it does not make a rank look busy
    network = sum(max(0, moved - first.network.get(each, 0)) for each, moved in last.network.items())
    used = (
        max(0.0, last.cpu_s - first.cpu_s - noise_s) + withheld_cpu_s(first, last, seconds),
        max(0, last.bytes_transferred - first.bytes_transferred),
        network,
    )
    return used[0] / seconds, used[1] / seconds, used[2] / seconds
