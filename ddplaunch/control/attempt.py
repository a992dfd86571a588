"""One attempt of a job: what has happened to its ranks so far, on all nodes together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from ddplaunch.control.failure import Failure, Verdict, judge
from ddplaunch.control.messages import Drained

SETTLE = 1.0
"""Seconds that a rank which only lost a peer waits for the peer's own, truer, failure before all are stopped."""


@dataclass(frozen=True)
class Loss:
    """A node that was lost while it took part."""

    moment: float
    host: str
    text: str

    def came_before(self, verdict: Verdict | None) -> bool:
        """Whether this is the cause of what failed: an exception elsewhere may be a word for it that we do not know."""
        if verdict is None or verdict.first.is_consequence:
            return True
        unsure = verdict.first.message is not None and verdict.first.host != self.host
        return verdict.first.moment > self.moment - (SETTLE if unsure else 0.0)


@dataclass
class Attempt:
    """What is known of it.

    Attributes:
        number: 0 is the first, -1 none yet.
        began: on the coordinator's clock.
        working: the nodes whose ranks have not done their work yet; undrained: those that have something left of it.
        stopped: how many ranks ended because they were told to.
        broken: what happened to a launcher's own processes.
        released: whether the nodes were told that all ranks have done their work.
        growing: whether it is stopped to take a node in.
        telling: whether nodes that have finished are told whom they wait for.
    """

    number: int = -1
    world_size: int = 0
    began: float = 0.0
    working: set[int] = field(default_factory=set)
    undrained: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)
    stopped: int = 0
    broken: str | None = None
    released: bool = False
    growing: bool = False
    telling: bool = False

    def gone(self, node: int) -> None:
        """Nothing of the attempt is left there; sets, as a look at all nodes each time would take N² looks."""
        self.working.discard(node)
        self.undrained.discard(node)

    def drained(self, node: int, message: Drained) -> None:
        """A node has told all there is to tell, failures that it had told of with more words now."""
        self.gone(node)
        told = [on_our_clock(each, message.clock) for each in message.failures]
        ranks = {each.rank for each in told}
        self.failures = [each for each in self.failures if each.rank not in ranks] + told
        self.stopped += message.stopped

    @property
    def verdict(self) -> Verdict | None:
        """Which failure came first, and what it brought about; None where no rank failed."""
        return judge(self.failures, self.stopped, self.world_size) if self.failures else None

    @property
    def whole(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failures or self.lost or self.broken)


def on_our_clock(failure: Failure, clock: float) -> Failure:
    """Shift a moment by what the other machine's clock is off; ``clock`` is its time now."""
    off = time.time() - clock
    return replace(failure, moment=failure.moment + off) if abs(off) > SETTLE / 10 else failure
