"""Before each attempt every node checks its machine: which have answered, and what follows if one lacks something."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.control.failure import Outcome, Verdict
from ddplaunch.control.membership import Membership
from ddplaunch.control.messages import Check, End, Unable
from ddplaunch.control.seat import Seat, Seats
from ddplaunch.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.words import named

LATE = 5.0  # seconds after which people read whose answer is awaited


class Checks:
    """The checks of one attempt after the other."""

    def __init__(
        self,
        seats: Seats,
        membership: Membership,
        after: Callable[[float, Callable[[], None]], None],
        start: Callable[[], None],
        end: Callable[[Outcome], None],
    ) -> None:
        """``after`` forgets what an attempt leaves; ``start`` is called when every node has what its ranks need."""
        self._rules, self._seats, self._membership = seats.rules, seats, membership
        self._after, self._start, self._end = after, start, end
        self._attempt = 0
        self._awaited: set[int] = set()  # empty but while all check themselves

    def begin(self, attempt: int) -> None:
        """Ask all nodes."""
        self._attempt = attempt
        self._awaited = set(self._seats)
        for number in list(self._seats):
            self.ask(number)
        if self._rules.several:
            self._after(LATE, self._tell_late)

    def ask(self, number: int) -> None:
        """Ask one node. Of what it answers while an attempt runs, nothing counts for the next."""
        if self._awaited:
            self._awaited.add(number)
        self._seats.tell(number, Check(self._attempt, self._rules.gpu_memory_timeout))

    def answered(self, number: int, attempt: int) -> None:
        """A node has what its ranks need in this attempt."""
        if attempt == self._attempt:
            self.gone(number)

    def gone(self, number: int) -> None:
        """This node has answered, or is lost."""
        if number in self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self._start()

    def failed(self, seat: Seat, said: Unable, before: Verdict | None, *, first: bool) -> None:
        """A node lacks something: go on without it, or end the job.

        ``before`` is how the attempt before has failed, where it did; ``first``: whether there was none.
        """
        if self._membership.can_spare(seat):
            text = f"{seat.name} is left out: {said.message}"
            del self._seats[seat.number]
            self._seats.note(text)
            self._seats.tell(seat.number, End(Outcome(EXIT_USAGE, refused=(text, said.hint))))
            return self.gone(seat.number)
        text = f"{seat.name}: {said.message}" if self._rules.several else said.message
        if seat.number and self._rules.elastic:
            left = self._membership.able - self._membership.is_able(seat)
            text += f"; without it {left} of at least {self._rules.min_nodes} nodes are left"
        if before is not None:
            self._end(Outcome(before.first.code, before, remark=f"no restart: {text}"))
        elif first:
            self._end(Outcome(EXIT_USAGE, refused=(text, said.hint)))
        else:
            self._end(Outcome(EXIT_UNAVAILABLE, remark=f"not started again: {text}"))

    def _tell_late(self) -> None:
        awaited = [self._seats[number].name for number in sorted(self._awaited & set(self._seats))]
        if awaited:
            self._seats.note(f"waiting for the check of {named(awaited)}")
