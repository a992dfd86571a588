"""The deadlines of ``LinkMachine``: each class is what the machine does when it is due."""

from __future__ import annotations

from ddplaunch.core.deadlines import Deadline


class JoinTimeoutOver(Deadline, frozen=True):
    """End this node: --join-timeout is over."""


class NoAnswerNoticeDue(Deadline, frozen=True):
    """Print that node 0 has not answered yet."""


class RetryDue(Deadline, frozen=True):
    """Begin the next attempt to connect."""


class StepLate(Deadline, frozen=True):
    """End this attempt to connect; ``problem``: what node 0 has not done in time, for the user."""

    problem: str


class NextAddressDue(Deadline, frozen=True):
    """Try the next address in parallel, if this connection is not open yet."""

    number: int


class StartErrorDue(Deadline, frozen=True):
    """End this node with the error that kept it from starting; node 0 has got the error, or is not reached."""
