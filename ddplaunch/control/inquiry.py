"""What the ranks of all nodes are doing, asked of every node at once, by node 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ddplaunch.control.messages import Inspect, Inspected, Message
from ddplaunch.control.seat import Seats
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.diagnosis.inspection import Detail, Inspection
from ddplaunch.loop import Timer
from ddplaunch.wire.frames import Garbled

PATIENCE = 3.0  # seconds for an answer to a person
MANY = 128  # ranks: with more, another node than node 0 is sent the main threads alone
_MAX_OPEN = 64  # questions that are open at a time


@dataclass
class _Question:
    done: Callable[[Inspection], None]
    timer: Timer
    awaited: set[int]  # the nodes that have not answered yet
    parts: list[Inspection] = field(default_factory=list)


class Inquiry:
    """All questions that are open."""

    def __init__(
        self, seats: Seats, tell: Callable[[int, Message], None], after: Callable[[float, Callable[[], None]], Timer]
    ) -> None:
        """``tell`` sends to a node; ``after`` is the loop's."""
        self._seats, self._tell, self._after = seats, tell, after
        self._open: dict[int, _Question] = {}
        self._serial = 0

    def ask(self, detail: Detail, done: Callable[[Inspection], None], within: float = PATIENCE) -> None:
        """Ask all nodes that have ranks; ``done`` gets the answer, without the nodes that are later than ``within``."""
        self._serial += 1
        serial = self._serial
        awaited = {seat.number for seat in self._seats.values() if seat.has_ranks}
        timer = self._after(within, lambda: self._close(serial))
        self._open[serial] = _Question(done, timer, awaited)
        for number in sorted(awaited):
            self._tell(number, Inspect(serial, detail, within))
        self._look(serial)

    def asked(self, number: int, message: Inspect) -> None:
        """Somebody asks on this node."""
        if len(self._open) < _MAX_OPEN:
            self.ask(message.detail, lambda found: self._tell(number, Inspected(message.serial, _fit(number, found))))

    def heard(self, number: int, message: Inspected) -> None:
        """A node has answered; Garbled where it speaks of ranks that are not its own."""
        ranks = self._seats[number].ranks
        if number and any(each.rank not in ranks for each in message.inspection.ranks):
            raise Garbled("what ranks do that are not its own")
        question = self._open.get(message.serial)
        if question is not None and number in question.awaited:
            question.awaited.discard(number)
            question.parts.append(message.inspection)
            self._look(message.serial)

    def gone(self, number: int) -> None:
        """This node is lost; a question that waited for it alone is answered in the loop's next turn.

        Not at once: who asked may decide what the job does next, and the loss is still being counted.
        """
        for serial, question in self._open.items():
            question.awaited.discard(number)
            self._after(0, partial(self._look, serial))

    def _look(self, serial: int) -> None:
        if serial in self._open and not self._open[serial].awaited:
            self._close(serial)

    def _close(self, serial: int) -> None:
        question = self._open.pop(serial)
        question.timer.cancel()
        ranks = sorted((each for part in question.parts for each in part.ranks), key=lambda each: each.rank)
        silent = tuple(self._seats[number].name for number in sorted(question.awaited) if number in self._seats)
        world_size = sum(len(seat.ranks) for seat in self._seats.values())
        question.done(Inspection(time.time(), tuple(ranks), world_size, silent))


def _fit(number: int, inspection: Inspection) -> Inspection:
    """What fits into one frame."""
    if number == 0 or len(inspection.ranks) <= MANY:
        return inspection
    return replace(inspection, ranks=tuple(replace(each, threads=each.threads[:1]) for each in inspection.ranks))
