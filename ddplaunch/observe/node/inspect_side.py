"""The part of inspection in the launcher of one node: inspections on request, stalls, stragglers, and late ranks."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial

import click
from msgspec.structs import replace

from ddplaunch.base.safe_files import current_folder, read_regular_file
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.printed_errors import describe_thread_error
from ddplaunch.core.agent.rank_files import MAX_ERROR_FILE_BYTES
from ddplaunch.core.events import AttemptSwept, Event, NoteAdded, RankExited, RankStartFailed
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import Message
from ddplaunch.core.output.log_message import LogMessage
from ddplaunch.observe.diagnosis.flight_recorder_arrivals import operations_per_rank, parse_arrivals
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals, Detail, Inspection, RankInspection
from ddplaunch.observe.diagnosis.rank_position import may_wait_for_thread
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits
from ddplaunch.observe.messages import ArrivalsReported, CrashInspected, CrashSeen
from ddplaunch.observe.node.in_flight import read_handled_exception
from ddplaunch.observe.node.node_inspections import NodeInspections
from ddplaunch.observe.node.programs import inspect_programs
from ddplaunch.observe.node.stall_detector import StallDetector
from ddplaunch.observe.node.straggler_monitor import StragglerMonitor
from ddplaunch.observe.options import Hangs
from ddplaunch.observe.rpc import KIND, inspect_job
from ddplaunch.observe.stacks_text import STACKS, render_stacks, stacks_to_json
from ddplaunch.system.plan.rank_layout import Rank

LONG_ATTEMPT_S = 300.0
"""A rank that succeeds this long after its first process group writes the arrivals at its last collectives."""


CRASH_TIMEOUT_S = 1.0
"""How long a rank in which native code has failed waits for its inspection."""

_CRASH_END_S = 30.0  # from the inspection to the end of the rank, at most
_CRASH_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


class InspectSide(NodeSide):
    """Inspects the ranks of this node, for node 0 and for other features, and watches for ranks that hang."""

    def __init__(self, context: FeatureContext) -> None:
        self._context, self._hangs = context, context.options[Hangs]
        self._is_isolated = context.job_config.port is None and context.plan.nnodes > 1  # no node sees the others
        self._ranks: NodeRanks | None = None  # of the current attempt, like the fields below
        self._stragglers: StragglerMonitor | None = None
        self._arrivals: list[CollectiveArrivals] = []  # of ranks that succeeded, after a long run
        # By rank: when it, or a child that it had forked, crashed (monotonic), and in which collectives the ranks were.
        self._crashes: dict[int, tuple[float, str]] = {}
        self._stall_detector: StallDetector | None = None  # of all attempts; None if no stall can be detected
        self._inspections = NodeInspections(
            context.loop,
            self._add_local_facts,
            lambda: inspect_programs(context.job.status().programs, context.node.streams),
            context.screen.show_note,
            node_only=self._is_isolated,
        )
        context.job.rpc.handlers[KIND.name] = context.loop.guard(self._inspections.answer)

    def inspect(self, loop: IsolatedLoop, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
        """Inspect this node's ranks for another feature, if an attempt has started; ``loop`` isolates ``on_done``."""
        if self._ranks is not None:
            self._inspect_ranks(detail, self._ranks, loop.guard(on_done))

    def _inspect_ranks(self, detail: Detail, ranks: NodeRanks, on_done: Callable[[Inspection], None]) -> None:
        if self._stall_detector and detail is Detail.STATE:
            on_done = self._stall_detector.wrap_inspection_callback(ranks, on_done)
        self._inspections.inspect_local(ranks, detail, on_done)

    def _add_local_facts(self, inspection: Inspection, ranks: NodeRanks) -> Inspection:
        if self._stall_detector:
            inspection = self._stall_detector.add_idle_times(inspection, ranks)
        return replace(inspection, ranks=tuple(map(self._add_thread_error, inspection.ranks)))

    def _add_thread_error(self, rank: RankInspection) -> RankInspection:
        if not may_wait_for_thread(rank):
            return rank
        text = describe_thread_error(self._context.node.streams.tail(rank.rank), current_folder())
        return replace(rank, thread_error=text or "")

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        context = self._context
        self._ranks, self._arrivals, self._crashes = ranks, [], {}
        self._stragglers = StragglerMonitor(
            context.loop,
            ranks,
            self._hangs.straggler_timeout,
            partial(self._inspect_ranks, Detail.STACKS),
            context.job.send,
            context.screen.show_note,
        )
        self._start_stall_detector(ranks)

    def _start_stall_detector(self, ranks: NodeRanks) -> None:
        """Start stall detection, unless this node cannot see all ranks."""
        context = self._context
        if ranks.plan.world_size == 1 and self._hangs.is_strict and not ranks.number:
            context.job.emit(NoteAdded("--stall-timeout has no effect in a job of one rank"))
        if ranks.plan.world_size == 1 or self._is_isolated or not context.config.inspect:
            return
        if self._stall_detector is None:
            inspect = partial(self._inspect_ranks, Detail.STATE)
            self._stall_detector = StallDetector(
                context.loop, self._hangs, inspect, context.job.send, context.screen.show_note
            )
        self._stall_detector.start_attempt(ranks)

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        if not self._context.config.inspect:
            return None
        files = {
            "in_flight_file": ranks.rank_file_path(rank.rank, "json.in-flight") or "",
            "trace_file": ranks.rank_file_path(rank.rank, "trace.json") or "",
        }
        return RankSide("observe/rank/inspect_side", {**files, "trace_min_age_s": LONG_ATTEMPT_S})

    def on_resume(self) -> None:
        if self._stall_detector:
            self._stall_detector.reset()

    def on_output(self, rank: int) -> None:
        if self._stall_detector:
            self._stall_detector.on_output(rank)

    def observe(self, event: Event) -> None:
        if self._stall_detector:
            self._stall_detector.observe(event)
        if self._ranks is None or self._stragglers is None:
            return
        match event:
            case RankExited():
                if event.code == 0:
                    self._read_arrivals(self._ranks, event.rank)
                self._stragglers.start_timers()
            case RankStartFailed():
                self._stragglers.start_timers()
            case AttemptSwept():  # before the attempt report, after which node 0 takes no more of this attempt
                if self._arrivals:
                    self._context.job.send(ArrivalsReported(self._ranks.number, tuple(self._arrivals)))

    def _read_arrivals(self, ranks: NodeRanks, rank: int) -> None:
        path = ranks.rank_file_path(rank, "trace.json")
        if path and os.path.exists(path):
            self._arrivals += read_arrivals_file(path, rank, ranks.plan.world_size)

    def on_crash(self, rank: int) -> bool:
        ranks = self._ranks
        if ranks is None or self._is_isolated or ranks.is_stop_requested(rank):
            return False
        self._context.job.send(CrashSeen(ranks.number, rank))
        ranks.timers.call_later(CRASH_TIMEOUT_S, partial(ranks.release_crashed, rank))
        return True

    def on_message(self, message: Message) -> None:
        if isinstance(message, CrashInspected) and self._ranks and message.attempt == self._ranks.number:
            self._crashes[message.rank] = time.monotonic(), message.text
            self._ranks.release_crashed(message.rank)

    def explain_failure(self, failure: RankFailure, peak_bytes: int) -> str | None:
        crashed_at, text = self._crashes.get(failure.rank, (-math.inf, ""))
        has_crashed = failure.signal in _CRASH_SIGNALS and time.monotonic() - crashed_at < _CRASH_END_S
        return text if text and has_crashed else None

    def find_exception(self, rank: int) -> tuple[str, str] | None:
        path = self._ranks.rank_file_path(rank, "json.in-flight") if self._ranks else None
        return read_handled_exception(path) if path and os.path.exists(path) else None

    def on_inspect_key(self) -> None:
        context = self._context
        context.screen.show_note("inspecting the ranks; press Ctrl-\\ again to stop the job")
        inspect_job(context.job.rpc, Detail.WAITS, context.loop.guard(self._show_inspection))

    def _show_inspection(self, inspection: Inspection) -> None:
        page = render_stacks(inspection)
        text, fields = "\n".join(describe_waits(inspection)), {"stacks": stacks_to_json(inspection)}
        lines = page if self._context.config.screen.colour else click.unstyle(page)
        self._context.screen.show_message(LogMessage(STACKS, text, fields, lines))


def read_arrivals_file(path: str, rank: int, world_size: int) -> tuple[CollectiveArrivals, ...]:
    """Read and remove the file in which a rank recorded when it arrived at its last collectives.

    Empty if it is truncated, as on a full disk.
    """
    try:
        traces = read_regular_file(path, MAX_ERROR_FILE_BYTES, follow_symlinks=False).splitlines()
        os.unlink(path)
        return tuple(each for trace in traces for each in parse_arrivals(rank, trace, operations_per_rank(world_size)))
    except (OSError, ValueError):
        return ()
