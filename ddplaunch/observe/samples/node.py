"""Samples CPU, memory, collectives and GPU usage of this node's ranks every 15 s (every 60 s after the first hour).

Nothing else wakes the launcher while all is well. A sample requests the collectives of the ranks, as ``ddplaunch ps``
does, and reads /proc; a helper process queries the GPU drivers. In the first 15 s of an attempt there are a few more
samples, until all ranks have entered their first collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct, field

from ddplaunch.base.event_loop import Callback, EventLoop, Timer
from ddplaunch.core import events
from ddplaunch.core.events import Event
from ddplaunch.core.feature import NodeSide
from ddplaunch.observe.diagnosis.flight_recorder_arrivals import operations_per_rank
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProgramInspection
from ddplaunch.observe.samples.sample import (
    MAX_COMPARABLE_RATE,
    GpuSample,
    NodeSample,
    ProgramSample,
    RankSample,
    ranks_behind,
)
from ddplaunch.system.devices.gpu_usage import GpuUsage, GpuUsageQuery, gpus_used_by
from ddplaunch.system.devices.process_usage import ProcessUsage, read_tree_usage
from ddplaunch.system.plan.plan import Plan

Inspect = Callable[[Detail, Callable[[Inspection], None]], None]
OnSample = Callable[["CounterSnapshot", "NodeSample | None"], None]

EARLY_INTERVALS_S = (1.0, 1.0, 2.0, 4.0, 7.0)  # in the first 15 s of an attempt, until its first collective
SAMPLE_INTERVAL_S = 15.0
LATER, AFTER = 60.0, 3600.0  # the interval once the job is older than ``AFTER``; seconds
FIRST_COLLECTIVE_LIMIT = 500  # collectives; a rank takes 12 ms to report that number


class CounterSnapshot(Struct, frozen=True):
    """Counters of a node at one moment, by rank; each counts since the start of the process."""

    plan: Plan
    time: float  # seconds since the epoch
    clock: float  # seconds, monotonic
    pids: Mapping[int, int] = field(default_factory=dict)
    usage: Mapping[int, ProcessUsage] = field(default_factory=dict)
    groups: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # collectives completed, by group
    behind_ranks: frozenset[int] = frozenset()
    gpus: tuple[GpuUsage, ...] = ()
    programs: tuple[ProgramInspection, ...] = ()  # beside the ranks of this node


class SampleCollector(NodeSide):
    """Takes the samples of one node, in all attempts, if there is a subscriber."""

    def __init__(
        self,
        loop: EventLoop,
        inspect: Inspect | None,
        emit: Callable[[Event], None],
        inspect_programs: Callable[[], tuple[ProgramInspection, ...]] = lambda: (),
    ) -> None:
        """``inspect`` finds the state or the lateness of this node's ranks; None if they cannot be inspected."""
        self._loop, self._inspect, self._emit, self._inspect_programs = loop, inspect, emit, inspect_programs
        self._subscribers: list[OnSample] = []
        self._listeners: list[Callback] = []
        self._began, self._late_interval_s = time.monotonic(), LATER
        self._plan: Plan | None = None
        self._attempt = -1
        self._pids: dict[int, int] = {}
        self._early: list[float] = []  # the remaining EARLY_INTERVALS_S
        self._timer: Timer | None = None
        self._before: CounterSnapshot | None = None  # None while ranks are starting
        self._is_sampling = self._first_known = False
        self._gpus: GpuUsageQuery | None = None

    def subscribe(self, on_sample: OnSample, *, late_interval_s: float = LATER) -> None:
        """Call ``on_sample`` with each sample from the first plan on, with None while no rank runs.

        ``late_interval_s``: at least so often after the first hour.
        """
        self._subscribers.append(on_sample)
        self._late_interval_s = min(self._late_interval_s, late_interval_s)

    def add_listener(self, on_sampled: Callback) -> None:
        """Call ``on_sampled`` after each sample; without a subscriber no samples are taken."""
        self._listeners.append(on_sampled)

    def observe(self, event: Event) -> None:
        if not self._subscribers:
            return
        match event:
            case events.AttemptPlanned(plan=plan, attempt=attempt):
                self._stop_gpu_query()  # its helper process may have been killed with the last attempt
                self._plan, self._attempt, self._pids, self._before = plan, attempt, {}, None
                self._is_sampling = self._first_known = False
                if self._timer is None:
                    self._publish(CounterSnapshot(plan, time.time(), time.monotonic()))
                self._schedule(SAMPLE_INTERVAL_S)
            case events.RankStarted(rank=rank, pid=pid):
                self._pids[rank] = pid
                if self._plan and len(self._pids) == len(self._plan.local_ranks):
                    self._before = CounterSnapshot(self._plan, time.time(), time.monotonic())
                    self._early = [*EARLY_INTERVALS_S[1:]]
                    self._schedule(EARLY_INTERVALS_S[0])
            case events.RankExited(rank=rank):
                self._pids.pop(rank, None)
            case events.JobEnded():
                self._stop_gpu_query()
                self._plan = self._before = None
                if self._timer is not None:
                    self._timer.cancel()

    def _publish(self, snapshot: CounterSnapshot, sample: NodeSample | None = None) -> None:
        for on_sample in self._subscribers:
            on_sample(snapshot, sample)
        for on_sampled in self._listeners:
            on_sampled()

    def _schedule(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        old = time.monotonic() - self._began > AFTER
        wait = self._early.pop(0) if self._early else self._late_interval_s if old else SAMPLE_INTERVAL_S
        if self._first_known:  # early samples are not needed any more
            wait += sum(self._early)
            self._early.clear()
        self._schedule(wait)
        if self._plan is not None and (self._before is None or not self._pids):
            programs = self._inspect_programs()
            self._publish(CounterSnapshot(self._plan, time.time(), time.monotonic(), programs=programs))
        elif not self._is_sampling:
            self._is_sampling = True
            if not self._query_gpus():
                self._query_ranks()

    # ------------------------------------------------------------------------------------------------------- one sample

    def _query_gpus(self) -> bool:
        """Query the driver, if ranks have GPUs; return whether ``_query_ranks`` will be called."""
        assert self._plan is not None
        if not any(rank.device.startswith("cuda") for rank in self._plan.local_ranks):
            return False

        self._gpus = self._gpus or GpuUsageQuery(self._loop, self._query_ranks)
        return self._gpus.query()

    def _stop_gpu_query(self) -> None:
        if self._gpus:
            self._gpus.close()
            self._gpus = None

    def _query_ranks(self) -> None:
        if not self._is_sampling or self._before is None:
            return
        if self._inspect:
            self._inspect(Detail.STATE, partial(self._on_ranks_inspected, self._attempt))
        else:
            self._on_ranks_inspected(self._attempt, None)

    def _on_ranks_inspected(self, attempt: int, inspection: Inspection | None) -> None:
        if attempt != self._attempt or self._before is None or self._plan is None:
            return
        self._is_sampling = False

        pids = dict(self._pids)
        used = {rank: found for rank, pid in pids.items() if (found := read_tree_usage(pid))}
        inspected = [each for each in inspection.ranks if each.rank in used] if inspection else []
        groups = {
            each.rank: {group.group: group.completed for group in each.groups} for each in inspected if each.groups
        }
        late = ranks_behind(inspection) if inspection else frozenset[int]()
        gpus = gpus_used_by(self._gpus.usage, pids.values()) if self._gpus else ()
        clocks, programs = (time.time(), time.monotonic()), self._inspect_programs()
        now = CounterSnapshot(self._plan, *clocks, pids, used, groups, late, gpus or (), programs)
        before, self._before = self._before, now
        self._publish(now, compute_sample(before, now, attempt))
        if inspection and not self._first_known:
            self._find_first_collective(attempt, inspection, now.time)

    # --------------------------------------------------------------------------------------------- the first collective

    def _find_first_collective(self, attempt: int, inspection: Inspection, now: float) -> None:
        """Emit ``FirstCollective`` once all ranks have entered one, with the current time if that was long ago."""
        entered = [sum(group.enqueued for group in rank.groups) for rank in inspection.ranks]
        if self._inspect is None or not entered or not all(entered):
            return
        self._first_known = True
        if max(entered) <= min(FIRST_COLLECTIVE_LIMIT, operations_per_rank(inspection.world_size)):
            self._inspect(Detail.LATENESS, partial(self._emit_first_collective, attempt, now))
        else:
            self._emit(events.FirstCollective(now))

    def _emit_first_collective(self, attempt: int, latest: float, inspection: Inspection) -> None:
        if attempt != self._attempt or self._before is None:
            return
        firsts = [min((each.began for each in rank.arrivals), default=latest) for rank in inspection.ranks]
        self._emit(events.FirstCollective(min(max(firsts), latest)))


def compute_sample(before: CounterSnapshot, now: CounterSnapshot, attempt: int) -> NodeSample:
    """Compute the rates between two snapshots of an attempt."""
    seconds = max(now.clock - before.clock, 1e-3)
    rates = {rank: _completed_collectives(before, now, rank) / seconds for rank in now.groups}
    fast = max(rates.values(), default=0.0) > MAX_COMPARABLE_RATE
    rows = []
    for rank, used in now.usage.items():
        was = before.usage.get(rank)
        cpus, read, written = (
            max(0.0, getattr(used, name) - (getattr(was, name) if was else 0)) / seconds
            for name in ("cpu", "read", "written")
        )
        late = None if rank not in now.groups or fast else float(rank in now.behind_ranks)
        rows.append(RankSample(rank, cpus, float(used.memory), read, written, rates.get(rank), late))
    ranks = {pid: rank for rank, pid in now.pids.items()}
    gpus = tuple(_gpu_sample(each, ranks) for each in now.gpus)
    earlier = {(each.program, each.pid): each.cpu for each in before.programs if each.is_running}
    programs = tuple(_program_sample(each, earlier, seconds) for each in now.programs if each.is_running)
    return NodeSample(now.time, seconds, attempt, tuple(sorted(rows)), gpus, programs)


def _program_sample(
    program: ProgramInspection, earlier: Mapping[tuple[str, int], float], seconds: float
) -> ProgramSample:
    was = earlier.get((program.program, program.pid))
    cpus = None if was is None else max(0.0, program.cpu - was) / seconds
    return ProgramSample(program.program, cpus, float(program.memory), program.quiet)


def _completed_collectives(before: CounterSnapshot, now: CounterSnapshot, rank: int) -> int:
    """Count the collectives that a rank has completed between two snapshots, in old and new groups."""
    was = before.groups.get(rank, {})
    return sum(max(0, count - was.get(group, 0)) for group, count in now.groups[rank].items())


def _gpu_sample(gpu: GpuUsage, ranks: Mapping[int, int]) -> GpuSample:
    rank = next((ranks[pid] for pid in gpu.pids if pid in ranks), -1)
    metrics = (None if each is None else float(each) for each in (gpu.busy, gpu.memory_used, gpu.power, gpu.slowed))
    return GpuSample(gpu.gpu, rank, *metrics)
