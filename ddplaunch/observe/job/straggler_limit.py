"""--straggler-timeout on node 0: whether ranks still run long after the others have ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch.base.text import format_elapsed, format_ranks
from ddplaunch.core.feature import JobContext
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.core.job.node_table import NodePhase
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.diagnosis.stall_check import describe_locations, find_stragglers, format_trace
from ddplaunch.observe.job.awaited_rank import format_hosts, make_failure
from ddplaunch.observe.options import Hangs

STRAGGLER_CHECK = "straggler check"  # the deadline
PAUSED_INTERVAL_S = 1.0  # the shortest, between two inspections while a rank waits for a user


class StragglerLimit:
    """Inspects the ranks when --straggler-timeout has expired, and stops the attempt if some ranks still run."""

    def __init__(self, context: JobContext, on_expired: Callable[[StopCause, Inspection], None]) -> None:
        """``on_expired`` is called when the straggler timeout has expired; it stops the attempt if ranks run."""
        self._context, self._nodes, self._on_expired = context, context.nodes, on_expired
        self._timeout_s = context.options[Hangs].straggler_timeout
        self._attempt = -1
        self._nodes_found: set[int] = set()  # nodes that have sent StragglersFound

    def begin(self, attempt: int) -> None:
        """Called when an attempt starts: reset the state of the previous one."""
        self._context.cancel_deadlines(STRAGGLER_CHECK)
        self._attempt = attempt
        self._nodes_found.clear()

    def on_ranks_finished(self) -> None:
        """Called when all ranks of a node have finished."""
        if self._timeout_s is not None and any(node.phase is NodePhase.RUNNING for node in self._nodes.values()):
            self._context.set_deadline(STRAGGLER_CHECK, self._timeout_s)

    def on_stragglers_found(self, node: int) -> None:
        """Called when ranks of a node still run --straggler-timeout after the node's other ranks have ended."""
        self._nodes_found.add(node)
        self.inspect()

    def inspect(self) -> None:
        """Inspect all ranks, to find those that still run. Also called at the deadline STRAGGLER_CHECK."""
        self._context.gather("inspect", Detail.STACKS, partial(self._check, self._attempt))

    def _check(self, attempt: int, inspection: Inspection) -> None:
        if attempt != self._attempt:
            return
        if self._context.limits.are_paused:
            return self._context.set_deadline(STRAGGLER_CHECK, max(PAUSED_INTERVAL_S, self._timeout_s or 0.0))
        working = [node for node in self._nodes.values() if node.phase is NodePhase.RUNNING]
        running = {rank for node in working for rank in node.ranks}
        left = find_stragglers(inspection, running)
        recent = {rank for node in working if node.node_rank not in self._nodes_found for rank in node.ranks}
        if not left or (recent & running) - {rank.rank for rank in left}:
            return  # some ranks there ended recently: wait for that node's StragglersFound
        trace, place = format_trace(left[0]), describe_locations(left)
        message = "still running after the other ranks had ended"
        failure = make_failure(self._context, attempt, inspection, left[0].rank, message, trace)
        seconds = format_elapsed(self._timeout_s or 0)
        ranks = [rank.rank for rank in left]
        text = f"{format_ranks(ranks)} still running {seconds} after the others had ended (--straggler-timeout)"
        text += (f": {place}" if place else "") + format_hosts(self._context, inspection, ranks)
        self._on_expired(StopCause(text, failure, rank_was_alive=True), inspection)
