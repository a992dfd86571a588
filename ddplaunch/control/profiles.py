"""The profile of all ranks that node 0 has every node take at once: each rank's goes on to who asked as it comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch.control.messages import Profiled, TakeProfile
from ddplaunch.control.seat import Seats
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.loop import Timer
from ddplaunch.wire.frames import Garbled

PATIENCE = 9.0  # seconds, beyond those of the profile, for a node to answer
BUSY = "another profile of this job is being taken"


@dataclass
class _Taking:
    asker: int  # the node that asked
    asked: int  # its number for that
    serial: int
    timer: Timer
    awaited: set[int]  # the nodes that have more to say
    told: set[int] = field(default_factory=set)  # the ranks that have come


class JobProfiles:
    """One at a time."""

    def __init__(self, seats: Seats, after: Callable[[float, Callable[[], None]], Timer]) -> None:
        """``after`` is the loop's."""
        self._seats, self._after = seats, after
        self._open: _Taking | None = None
        self._serial = 0

    def hear(self, number: int, message: TakeProfile | Profiled) -> None:
        """Take in a node's question, or an answer; Garbled where it speaks of ranks that are not its own."""
        if isinstance(message, Profiled):
            self._answered(number, message)
        elif self._open is not None:
            self._seats.tell(number, Profiled(message.serial, over=True, refused=BUSY))
        else:
            self._begin(number, message)

    def _begin(self, number: int, message: TakeProfile) -> None:
        self._serial += 1
        serial = self._serial
        awaited = {seat.number for seat in self._seats.values() if seat.has_ranks}
        timer = self._after(message.seconds + PATIENCE, partial(self._close, serial))
        self._open = _Taking(number, message.serial, serial, timer, awaited)
        for each in sorted(awaited):
            self._seats.tell(each, replace(message, serial=serial))
        self._close_if_answered(serial)

    def _answered(self, number: int, message: Profiled) -> None:
        found = self._open
        if found is None or message.serial != found.serial or number not in found.awaited:
            return
        if message.profile:
            rank = message.profile.rank
            if number and (rank not in self._seats[number].ranks or rank in found.told):
                raise Garbled("the profile of a rank that is not its own, or again")
            found.told.add(rank)
            self._seats.tell(found.asker, Profiled(found.asked, message.profile))
        if message.over:
            found.awaited.discard(number)
            self._close_if_answered(found.serial)

    def gone(self, number: int) -> None:
        """This node is lost; what it would have told is not waited for."""
        if self._open is not None:
            self._open.awaited.discard(number)
            self._after(0, partial(self._close_if_answered, self._open.serial))

    def _close_if_answered(self, serial: int) -> None:
        if self._open is not None and not self._open.awaited:
            self._close(serial)

    def _close(self, serial: int) -> None:
        found = self._open
        if found is None or found.serial != serial:
            return
        self._open = None
        found.timer.cancel()
        silent = tuple(self._seats[number].name for number in sorted(found.awaited) if number in self._seats)
        self._seats.tell(found.asker, Profiled(found.asked, over=True, silent=silent))
