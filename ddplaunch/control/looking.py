"""What node 0 sees of all ranks: whenever somebody asks, and once before those of an attempt are stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.attempt import JobAttempt
from ddplaunch.control.messages import Inspect, Inspected, Message
from ddplaunch.control.rules import Rules
from ddplaunch.control.seat import Seats
from ddplaunch.loop import Timer

if TYPE_CHECKING:
    from ddplaunch.control.inquiry import Inquiry
    from ddplaunch.diagnosis.inspection import Detail, Inspection

LOOK = 1.0  # seconds at most for a look at the ranks before they are stopped


class Looking:
    """All looks of a job. What they take is loaded with the first of them."""

    def __init__(
        self,
        rules: Rules,
        seats: Seats,
        tell: Callable[[int, Message], None],
        after: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        """``tell`` sends to a node; ``after`` is the loop's."""
        self._rules, self._seats, self._tell, self._after = rules, seats, tell, after
        self._begun: Inquiry | None = None

    @property
    def _inquiry(self) -> Inquiry:
        from ddplaunch.control.inquiry import Inquiry

        self._begun = self._begun or Inquiry(self._seats, self._tell, self._after)
        return self._begun

    def hear(self, number: int, message: Inspect | Inspected) -> None:
        """Take in a node's question, or its answer; Garbled where it speaks of ranks that are not its own."""
        if isinstance(message, Inspect):
            self._inquiry.asked(number, message)
        else:
            self._inquiry.heard(number, message)

    def gone(self, number: int) -> None:
        """This node is lost."""
        if self._begun:
            self._begun.gone(number)

    def first(self, attempt: JobAttempt, then: Callable[[], None]) -> bool:
        """Look at all ranks, once an attempt, and call ``then`` after that; False where nothing is to be looked at."""
        if attempt.look is None and not attempt.looking and not attempt.growing and self._rules.looks:
            from ddplaunch.diagnosis.inspection import Detail

            attempt.looking = True
            # What waits need not be known where a rank failed by its own doing: that takes a tenth of a second more.
            own_doing = any(not failure.is_consequence for failure in attempt.failures)
            detail = Detail.STACKS if own_doing else Detail.WAITS
            self._inquiry.ask(detail, partial(self._looked, attempt), LOOK)
        if attempt.looking:
            attempt.after_look.append(then)
        return attempt.looking

    def ask(self, detail: Detail, done: Callable[[Inspection], None]) -> None:
        """Look at all ranks for ``done``, whatever becomes of them."""
        self._inquiry.ask(detail, done)

    def keep(self, attempt: JobAttempt, inspection: Inspection) -> None:
        """Have what was found as what the ranks of an attempt were doing before they were stopped."""
        attempt.looking, attempt.look = False, inspection
        self._tell(0, Inspected(0, inspection))

    def _looked(self, attempt: JobAttempt, inspection: Inspection) -> None:
        self.keep(attempt, inspection)
        for then in attempt.after_look:
            then()
