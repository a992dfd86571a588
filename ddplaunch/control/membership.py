"""Which of the nodes that have joined get ranks, and how often that may change.

All do; with spares as many as the job needs, and these keep their places from attempt to attempt.
"""

from __future__ import annotations

from collections import Counter

from ddplaunch.control.attempt import Loss, Stage
from ddplaunch.control.failure import Verdict
from ddplaunch.control.seat import Seat, Seats
from ddplaunch.words import named

ENOUGH = 2  # failures of a host after which it gets no ranks any more


class Membership:
    """Those that have ranks in one attempt after the other."""

    def __init__(self, seats: Seats) -> None:
        self._rules, self._seats = seats.rules, seats
        self.changes = 0  # of those that ``--max-membership-changes`` allows
        self._places: list[Seat] = []  # the nodes of the latest attempt, in order
        self._resting: set[int] = set()  # those that are to give their place to others, if there are any
        self._failures = Counter[str]()  # of each host

    def is_able(self, seat: Seat) -> bool:
        """Whether a node may have ranks."""
        return not seat.number or (self._failures[seat.host] < ENOUGH and not seat.leaving)

    @property
    def able(self) -> int:
        """How many nodes may have ranks."""
        return sum(map(self.is_able, self._seats.values()))

    @property
    def too_few(self) -> str | None:
        """What people read where these are not enough for the job; None where they are."""
        able, least = self.able, self._rules.min_nodes
        return f"{able} of at least {least} nodes are left" if able < least else None

    @property
    def has_room(self) -> bool:
        """Whether one more node could have had ranks in this attempt."""
        return len(self._places) < self._rules.most_nodes

    @property
    def going_on(self) -> str:
        """Whom the next attempt starts with."""
        line = self.next()
        return f"going on with {len(line)} node{'s' * (len(line) > 1)}: {named(seat.name for seat in line)}"

    def welcome(self, seat: Seat) -> str:
        """What people read of a node that joins while others run."""
        if not self.is_able(seat):
            return f"{seat.name} has joined, but gets no ranks: it has failed {self._failures[seat.host]} times"
        if not self.has_room:
            return f"{seat.name} has joined as a spare"
        return f"{seat.name} has joined; it takes part when the ranks start next"

    def can_spare(self, seat: Seat) -> bool:
        """Whether the job can go on without a node."""
        return bool(seat.number) and self.able - self.is_able(seat) >= self._rules.min_nodes

    def can_leave(self, seat: Seat, stage: Stage) -> bool:
        """Whether a SIGTERM there, as eviction and scale-down begin, takes away that node and does not end the job."""
        elastic = self._rules.elastic and bool(seat.number)
        return elastic and (stage is Stage.JOINING or self.can_spare(seat))

    def failed(self, seat: Seat) -> None:
        """A node was lost, or an attempt began to fail there: where there are spares, one takes its place.

        Node 0 keeps its place: all the others are connected to it.
        """
        if not self._rules.spares or not seat.number:
            return
        self._resting.add(seat.number)
        self._failures[seat.host] += 1
        if not self.is_able(seat):
            self._seats.note(f"{seat.name} has failed {self._failures[seat.host]} times: it gets no ranks any more")

    def blame(self, verdict: Verdict | None, broken: Loss | None) -> str | None:
        """An attempt has failed: its node is known, unless ranks only saw what had happened to others.

        Return what ``too_few`` says then.
        """
        for seat in () if verdict and verdict.first.is_consequence else self._places:
            here = verdict.first.rank in seat.ranks if verdict else broken and broken.node == seat.number
            if here and seat.number in self._seats:
                self.failed(seat)
        return self.too_few

    def change(self, why: str) -> str | None:
        """Count one more; return None, or why the job cannot go on where it cannot: ``why``, and what is used up."""
        if few := self.too_few:
            return f"{why}; {few}" if self._rules.elastic else why
        if self.changes >= self._rules.max_membership_changes:
            return f"{why}; all {self._rules.max_membership_changes} --max-membership-changes were used"
        self.changes += 1
        return None

    def next(self) -> list[Seat]:
        """The nodes that are to have ranks in the next attempt, in order."""
        able = {seat.number: seat for seat in self._seats.in_order if self.is_able(seat)}
        if not self._rules.spares:
            return [*able.values()]
        stay = {seat.number for seat in self._places if seat.number in able} - self._resting
        # Those that have failed just now come last.
        others = sorted((number for number in able if number not in stay), key=self._resting.__contains__)
        line = []
        for seat in self._places:
            if seat.number in stay:
                line.append(seat.number)
            elif others:
                line.append(others.pop(0))
        return [able[number] for number in [*line, *others][: self._rules.most_nodes]]

    def begin(self) -> list[Seat]:
        """The nodes that have ranks from now on; people hear what is new in that."""
        before, self._places = self._places, self.next()
        self._resting.clear()
        if self._rules.spares:
            self._tell([seat.name for seat in before], [seat.name for seat in self._places])
        return self._places

    def _tell(self, before: list[str], names: list[str]) -> None:
        """Say who has come for whom, and at the first start who waits."""
        former, running = set(before), set(names)
        for new, old in zip(names, before, strict=False):
            if new not in former:
                self._seats.note(f"{new} takes the place of {old}")
        waiting = [seat.name for seat in self._seats.in_order if seat.name not in running]
        if waiting and not before:
            self._seats.note(f"waiting as spare{'s' * (len(waiting) > 1)}: {named(waiting)}")
