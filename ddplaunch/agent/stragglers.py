"""Ranks that still run long after others have ended well: often one that hangs, and nothing else would say which."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.agent.attempt import Attempt
from ddplaunch.loop import Loop, Timer
from ddplaunch.words import named

QUIET = 30.0
"""Seconds without the end of a rank after which the others are named. Rank 0 may be writing the last checkpoint."""


class Stragglers:
    """Those of one attempt, on this node."""

    def __init__(self, loop: Loop, attempt: Attempt, say: Callable[[str], None], *, alone: bool) -> None:
        """``alone``: no other node takes part, whose ranks could be meant."""
        self._loop = loop
        self._attempt = attempt
        self._say = say
        self._alone = alone
        self._timer: Timer | None = None

    def watch(self) -> None:
        """A rank has ended: from now on, time is counted anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.after(QUIET, self._tell)

    def _tell(self) -> None:
        if self._attempt.pending or self._attempt.failures:
            return
        left = [each for each in self._attempt.processes.values() if not each.finished and not each.signalled]
        if left:
            names = named(f"rank {each.rank.rank} (pid {each.pid})" for each in left)
            where = "" if self._alone else f" on {left[0].rank.host or 'this node'}"
            self._say(f"the other ranks{where} are done; waiting for {names}")
