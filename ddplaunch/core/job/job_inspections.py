"""Inspections of the whole job: node 0 asks all nodes what their ranks are doing and merges the replies.

On request (`ddplaunch stacks`, a suspected stall), and once before the ranks of an attempt are stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.event_loop import Timer
from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.job.job_attempt import JobAttempt, to_local_time
from ddplaunch.core.job.node_table import NodeTable
from ddplaunch.core.messages import InspectReply, InspectRequest
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection

REPLY_TIMEOUT_S = 3.0  # for an inspection that a user or a stall check requested
BEFORE_STOP_TIMEOUT_S = 1.0  # for the inspection before the ranks are stopped
MAX_FULL_STACK_RANKS = 128  # with more ranks, other nodes get the main threads only: the reply must fit in a frame
_MAX_PENDING = 64  # inspections at a time


class _PendingInspection(Struct):
    on_done: Callable[[Inspection], None]
    timer: Timer
    waiting_for: set[int]  # nodes without a reply
    replies: list[Inspection] = field(default_factory=list)


class JobInspections:
    """All inspections of a job, by serial."""

    def __init__(self, nodes: NodeTable, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``call_later`` is the loop's."""
        self._config, self._nodes, self._call_later = nodes.config, nodes, call_later
        self._pending: dict[int, _PendingInspection] = {}
        self._serial = 0

    def begin(self, detail: Detail, on_done: Callable[[Inspection], None], timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Ask all nodes with ranks; ``on_done`` gets the merged inspection, after ``timeout_s`` at the latest."""
        self._serial += 1
        serial = self._serial
        waiting_for = {node.node_rank for node in self._nodes.values() if node.has_ranks}
        timer = self._call_later(timeout_s, lambda: self._close(serial))
        self._pending[serial] = _PendingInspection(on_done, timer, waiting_for)
        for number in sorted(waiting_for):
            self._nodes.send(number, InspectRequest(serial, detail, timeout_s))
        self._close_if_complete(serial)

    def inspect_before_stop(self, attempt: JobAttempt, on_done: Callable[[], None]) -> bool:
        """Inspect all ranks, once an attempt, then call ``on_done``; False if there is no inspection to wait for."""
        if (
            attempt.inspection is None
            and not attempt.is_inspecting
            and not attempt.stopping_to_change_nodes
            and self._config.inspects_before_stop
        ):
            attempt.is_inspecting = True
            # If a rank failed by itself, the waits of the others do not matter, and take 0.1 s more to read.
            failed_by_itself = any(not failure.is_secondary for failure in attempt.failures)
            detail = Detail
            self.begin(
                detail.STACKS if failed_by_itself else detail.WAITS,
                partial(self._on_inspected_before_stop, attempt),
                BEFORE_STOP_TIMEOUT_S,
            )
        if attempt.is_inspecting:
            attempt.after_inspection.append(on_done)
        return attempt.is_inspecting

    def store(self, attempt: JobAttempt, inspection: Inspection) -> None:
        """Record what the ranks of an attempt were doing before they were stopped; node 0 gets it for the report."""
        attempt.is_inspecting, attempt.inspection = False, inspection
        self._nodes.send(0, InspectReply(0, inspection))

    def _on_inspected_before_stop(self, attempt: JobAttempt, inspection: Inspection) -> None:
        self.store(attempt, inspection)
        for then in attempt.after_inspection:
            then()

    def on_message(self, number: int, message: InspectRequest | InspectReply) -> None:
        """Handle a request or a reply of a node; ProtocolError if a reply has ranks of another node."""
        if isinstance(message, InspectReply):
            self._on_reply(number, message)
        elif len(self._pending) < _MAX_PENDING:
            self.begin(message.detail, partial(self._send_reply, number, message.serial))

    def _send_reply(self, number: int, serial: int, inspection: Inspection) -> None:
        self._nodes.send(number, InspectReply(serial, _shrink_to_frame(number, inspection)))

    def _on_reply(self, number: int, message: InspectReply) -> None:
        ranks = self._nodes[number].ranks
        if number and any(each.rank not in ranks for each in message.inspection.ranks):
            raise ProtocolError("an inspection of ranks that are not its own")
        pending = self._pending.get(message.serial)
        if pending is not None and number in pending.waiting_for:
            pending.waiting_for.discard(number)
            pending.replies.append(_with_local_times(message.inspection) if number else message.inspection)
            self._close_if_complete(message.serial)

    def on_node_lost(self, number: int) -> None:
        """Called when a node is lost: stop waiting for it, from the loop's next round on.

        Not at once: ``on_done`` may decide what the job does next, and the coordinator is still handling the loss.
        """
        for serial, pending in self._pending.items():
            pending.waiting_for.discard(number)
            self._call_later(0, partial(self._close_if_complete, serial))

    def _close_if_complete(self, serial: int) -> None:
        if serial in self._pending and not self._pending[serial].waiting_for:
            self._close(serial)

    def _close(self, serial: int) -> None:
        pending = self._pending.pop(serial)
        pending.timer.cancel()
        ranks = sorted((each for part in pending.replies for each in part.ranks), key=lambda each: each.rank)
        silent = tuple(self._nodes[number].name for number in sorted(pending.waiting_for) if number in self._nodes)
        world_size = sum(len(node.ranks) for node in self._nodes.values())
        pending.on_done(Inspection(time.time(), tuple(ranks), world_size, silent))


def _with_local_times(inspection: Inspection) -> Inspection:
    """Convert the times at which ranks ended from another node's clock to node 0's."""
    ended = [None if each.ended is None else to_local_time(each.ended, inspection.moment) for each in inspection.ranks]
    if not any(ended):
        return inspection
    ranks = tuple(replace(rank, ended=moment) for rank, moment in zip(inspection.ranks, ended, strict=True))
    return replace(inspection, ranks=ranks)


def _shrink_to_frame(number: int, inspection: Inspection) -> Inspection:
    """Drop stacks so that the inspection fits in one frame."""
    if number == 0 or len(inspection.ranks) <= MAX_FULL_STACK_RANKS:
        return inspection
    return replace(inspection, ranks=tuple(replace(each, threads=each.threads[:1]) for each in inspection.ranks))
