"""What the ranks of all nodes are doing, which node 0 asks every node at once: whenever somebody wants to know, and
once before the ranks of an attempt are stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.attempt import JobAttempt, to_local_time
from ddplaunch.control.messages import InspectReply, InspectRequest
from ddplaunch.control.seat import NodeTable
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import Timer
from ddplaunch.wire.frames import ProtocolError

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Detail, Inspection

REPLY_TIMEOUT_S = 3.0  # seconds for an answer to a person
BEFORE_STOP_TIMEOUT_S = 1.0  # seconds at most to inspect ranks before they are stopped
MAX_FULL_STACK_RANKS = 128  # ranks: with more, another node than node 0 is sent the main threads alone
_MAX_PENDING = 64  # inspections that are open at a time


@dataclass
class _PendingInspection:
    on_done: Callable[[Inspection], None]
    timer: Timer
    waiting_for: set[int]  # the nodes that have not answered yet
    replies: list[Inspection] = field(default_factory=list)


class JobInspections:
    """All inspections of a job."""

    def __init__(self, seats: NodeTable, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``call_later`` is the loop's."""
        self._rules, self._seats, self._after = seats.rules, seats, call_later
        self._open: dict[int, _PendingInspection] = {}
        self._serial = 0

    def begin(self, detail: Detail, on_done: Callable[[Inspection], None], timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Ask all nodes that have ranks; ``on_done`` gets the answer, without the nodes that are later than ``timeout_s``."""
        self._serial += 1
        serial = self._serial
        awaited = {seat.node_rank for seat in self._seats.values() if seat.has_ranks}
        timer = self._after(timeout_s, lambda: self._close(serial))
        self._open[serial] = _PendingInspection(on_done, timer, awaited)
        for number in sorted(awaited):
            self._seats.tell(number, InspectRequest(serial, detail, timeout_s))
        self._close_if_complete(serial)

    def inspect_before_stop(self, attempt: JobAttempt, on_done: Callable[[], None]) -> bool:
        """Inspect all ranks, once an attempt, and call ``on_done`` after that; False where they are not inspected."""
        if (
            attempt.inspection is None
            and not attempt.is_inspecting
            and not attempt.stopping_to_grow
            and self._rules.inspects_before_stop
        ):
            attempt.is_inspecting = True
            # What waits need not be known where a rank failed by its own doing: that takes a tenth of a second more.
            own_doing = any(not failure.is_secondary for failure in attempt.failures)
            detail = diagnosis.inspection.Detail
            self.begin(
                detail.STACKS if own_doing else detail.WAITS,
                partial(self._on_inspected_before_stop, attempt),
                BEFORE_STOP_TIMEOUT_S,
            )
        if attempt.is_inspecting:
            attempt.after_inspection.append(on_done)
        return attempt.is_inspecting

    def store(self, attempt: JobAttempt, inspection: Inspection) -> None:
        """Keep what was found as what the ranks of an attempt were doing before they were stopped."""
        attempt.is_inspecting, attempt.inspection = False, inspection
        self._seats.tell(0, InspectReply(0, inspection))

    def _on_inspected_before_stop(self, attempt: JobAttempt, inspection: Inspection) -> None:
        self.store(attempt, inspection)
        for then in attempt.after_inspection:
            then()

    def on_message(self, number: int, message: InspectRequest | InspectReply) -> None:
        """Take in a node's question, or its answer; Garbled where it speaks of ranks that are not its own."""
        if isinstance(message, InspectReply):
            self._on_reply(number, message)
        elif len(self._open) < _MAX_PENDING:
            self.begin(message.detail, partial(self._send_reply, number, message.serial))

    def _send_reply(self, number: int, serial: int, found: Inspection) -> None:
        self._seats.tell(number, InspectReply(serial, _shrink_to_frame(number, found)))

    def _on_reply(self, number: int, message: InspectReply) -> None:
        ranks = self._seats[number].ranks
        if number and any(each.rank not in ranks for each in message.inspection.ranks):
            raise ProtocolError("what ranks do that are not its own")
        found = self._open.get(message.serial)
        if found is not None and number in found.waiting_for:
            found.waiting_for.discard(number)
            found.replies.append(_on_our_clock(message.inspection) if number else message.inspection)
            self._close_if_complete(message.serial)

    def on_node_lost(self, number: int) -> None:
        """This node is lost; an inspection that waited for it alone is over in the loop's next turn.

        Not at once: who asked may decide what the job does next, and the loss is still being counted.
        """
        for serial, found in self._open.items():
            found.waiting_for.discard(number)
            self._after(0, partial(self._close_if_complete, serial))

    def _close_if_complete(self, serial: int) -> None:
        if serial in self._open and not self._open[serial].waiting_for:
            self._close(serial)

    def _close(self, serial: int) -> None:
        found = self._open.pop(serial)
        found.timer.cancel()
        ranks = sorted((each for part in found.replies for each in part.ranks), key=lambda each: each.rank)
        silent = tuple(self._seats[number].name for number in sorted(found.waiting_for) if number in self._seats)
        world_size = sum(len(seat.ranks) for seat in self._seats.values())
        found.on_done(diagnosis.inspection.Inspection(time.time(), tuple(ranks), world_size, silent))


def _on_our_clock(found: Inspection) -> Inspection:
    """An inspection of another node, with the moments at which ranks ended there shifted to our clock."""
    ended = [None if each.ended is None else to_local_time(each.ended, found.moment) for each in found.ranks]
    if not any(ended):
        return found
    ranks = tuple(replace(rank, ended=moment) for rank, moment in zip(found.ranks, ended, strict=True))
    return replace(found, ranks=ranks)


def _shrink_to_frame(number: int, inspection: Inspection) -> Inspection:
    """What fits into one frame."""
    if number == 0 or len(inspection.ranks) <= MAX_FULL_STACK_RANKS:
        return inspection
    return replace(inspection, ranks=tuple(replace(each, threads=each.threads[:1]) for each in inspection.ranks))
