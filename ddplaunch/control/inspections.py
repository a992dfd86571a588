"""What the ranks of all nodes are doing, which node 0 asks every node at once: whenever somebody wants to know, and
once before the ranks of an attempt are stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.attempt import JobAttempt, on_our_clock
from ddplaunch.control.messages import Inspect, Inspected
from ddplaunch.control.seat import Seats
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import Timer
from ddplaunch.wire.frames import Garbled

if TYPE_CHECKING:
    from ddplaunch.diagnosis.inspection import Detail, Inspection

PATIENCE = 3.0  # seconds for an answer to a person
BEFORE_STOP = 1.0  # seconds at most to inspect ranks before they are stopped
MANY = 128  # ranks: with more, another node than node 0 is sent the main threads alone
_MAX_OPEN = 64  # inspections that are open at a time


@dataclass
class _Open:
    done: Callable[[Inspection], None]
    timer: Timer
    awaited: set[int]  # the nodes that have not answered yet
    parts: list[Inspection] = field(default_factory=list)


class JobInspections:
    """All inspections of a job."""

    def __init__(self, seats: Seats, after: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``after`` is the loop's."""
        self._rules, self._seats, self._after = seats.rules, seats, after
        self._open: dict[int, _Open] = {}
        self._serial = 0

    def begin(self, detail: Detail, done: Callable[[Inspection], None], within: float = PATIENCE) -> None:
        """Ask all nodes that have ranks; ``done`` gets the answer, without the nodes that are later than ``within``."""
        self._serial += 1
        serial = self._serial
        awaited = {seat.number for seat in self._seats.values() if seat.has_ranks}
        timer = self._after(within, lambda: self._close(serial))
        self._open[serial] = _Open(done, timer, awaited)
        for number in sorted(awaited):
            self._seats.tell(number, Inspect(serial, detail, within))
        self._close_if_answered(serial)

    def before_stop(self, attempt: JobAttempt, then: Callable[[], None]) -> bool:
        """Inspect all ranks, once an attempt, and call ``then`` after that; False where they are not inspected."""
        if attempt.inspection is None and not attempt.inspecting and not attempt.growing and self._rules.inspects:
            attempt.inspecting = True
            # What waits need not be known where a rank failed by its own doing: that takes a tenth of a second more.
            own_doing = any(not failure.is_consequence for failure in attempt.failures)
            detail = diagnosis.inspection.Detail
            self.begin(detail.STACKS if own_doing else detail.WAITS, partial(self._inspected, attempt), BEFORE_STOP)
        if attempt.inspecting:
            attempt.after_inspection.append(then)
        return attempt.inspecting

    def keep(self, attempt: JobAttempt, inspection: Inspection) -> None:
        """Keep what was found as what the ranks of an attempt were doing before they were stopped."""
        attempt.inspecting, attempt.inspection = False, inspection
        self._seats.tell(0, Inspected(0, inspection))

    def _inspected(self, attempt: JobAttempt, inspection: Inspection) -> None:
        self.keep(attempt, inspection)
        for then in attempt.after_inspection:
            then()

    def hear(self, number: int, message: Inspect | Inspected) -> None:
        """Take in a node's question, or its answer; Garbled where it speaks of ranks that are not its own."""
        if isinstance(message, Inspected):
            self._answered(number, message)
        elif len(self._open) < _MAX_OPEN:
            self.begin(message.detail, partial(self._answer, number, message.serial))

    def _answer(self, number: int, serial: int, found: Inspection) -> None:
        self._seats.tell(number, Inspected(serial, _fit(number, found)))

    def _answered(self, number: int, message: Inspected) -> None:
        ranks = self._seats[number].ranks
        if number and any(each.rank not in ranks for each in message.inspection.ranks):
            raise Garbled("what ranks do that are not its own")
        found = self._open.get(message.serial)
        if found is not None and number in found.awaited:
            found.awaited.discard(number)
            found.parts.append(_on_our_clock(message.inspection) if number else message.inspection)
            self._close_if_answered(message.serial)

    def gone(self, number: int) -> None:
        """This node is lost; an inspection that waited for it alone is over in the loop's next turn.

        Not at once: who asked may decide what the job does next, and the loss is still being counted.
        """
        for serial, found in self._open.items():
            found.awaited.discard(number)
            self._after(0, partial(self._close_if_answered, serial))

    def _close_if_answered(self, serial: int) -> None:
        if serial in self._open and not self._open[serial].awaited:
            self._close(serial)

    def _close(self, serial: int) -> None:
        found = self._open.pop(serial)
        found.timer.cancel()
        ranks = sorted((each for part in found.parts for each in part.ranks), key=lambda each: each.rank)
        silent = tuple(self._seats[number].name for number in sorted(found.awaited) if number in self._seats)
        world_size = sum(len(seat.ranks) for seat in self._seats.values())
        found.done(diagnosis.inspection.Inspection(time.time(), tuple(ranks), world_size, silent))


def _on_our_clock(found: Inspection) -> Inspection:
    """An inspection of another node, with the moments at which ranks ended there shifted to our clock."""
    ended = [None if each.ended is None else on_our_clock(each.ended, found.moment) for each in found.ranks]
    if not any(ended):
        return found
    ranks = tuple(replace(rank, ended=moment) for rank, moment in zip(found.ranks, ended, strict=True))
    return replace(found, ranks=ranks)


def _fit(number: int, inspection: Inspection) -> Inspection:
    """What fits into one frame."""
    if number == 0 or len(inspection.ranks) <= MANY:
        return inspection
    return replace(inspection, ranks=tuple(replace(each, threads=each.threads[:1]) for each in inspection.ranks))
