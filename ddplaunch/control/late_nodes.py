"""The nodes that a job still waits for when others have finished: these hear which."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.control.messages import Message, Note
from ddplaunch.control.seat import Part, Seats
from ddplaunch.words import named

EARLY = 1.0  # seconds after which a node that has finished says which nodes it waits for
STILL_WAITING = 30.0  # seconds after which it says so again, if it waits for others by then


class LateNodes:
    """Those of one attempt after the other."""

    def __init__(
        self,
        seats: Seats,
        kind: str,
        tell: Callable[[int, Message], None],
        after: Callable[[float, Callable[[], None]], None],
        running: Callable[[], bool],
    ) -> None:
        """``kind``: what people call a node; ``after`` forgets what an attempt leaves; ``running``: whether one is."""
        self._seats, self._kind, self._tell, self._after, self._running = seats, kind, tell, after, running
        self._attempt = -1

    def finished(self, attempt: int) -> None:
        """A node has."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._after(EARLY, self._tell_early)

    def _tell_early(self) -> None:
        """Tell the nodes that have finished which others they wait for; all of them together, now and then."""
        awaited = [seat.name for seat in self._seats.in_order if seat.part is Part.RUNNING]
        if not self._running() or not awaited:
            return
        text = f"the ranks of this {self._kind} are done; waiting for {named(awaited)}"
        for number, seat in list(self._seats.items()):
            if seat.part in (Part.FINISHED, Part.DRAINED) and seat.awaited != text:
                seat.awaited = text
                self._tell(number, Note(text))
        self._after(STILL_WAITING, self._tell_early)
