"""Questions what ranks are doing: those of people here, which node 0 answers, and node 0's own, answered here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.messages import FromNode, Inspect, Inspected
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import Loop, Timer

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import Ranks
    from ddplaunch.diagnosis.inspection import Detail, Inspection

PATIENCE = 4.0  # seconds for node 0 to answer
_WITHIN = 3.0  # seconds that a look at the ranks takes at most
_EARLY = 0.1  # seconds that an answer needs on its way


@dataclass(frozen=True)
class _Look:
    ranks: Ranks
    detail: Detail
    done: Callable[[Inspection], None]
    until: float


class Questions:
    """Those that are open on this node. Its own ranks are looked at by one inspection at a time."""

    def __init__(self, loop: Loop, tell: Callable[[FromNode], None], *, node_only: bool) -> None:
        """``tell`` tells the job; ``node_only``: it is this node alone (``--control none``)."""
        self._loop, self._tell, self._node_only = loop, tell, node_only
        self._open: dict[int, tuple[Callable[[Inspection], None], Timer]] = {}
        self._serial = 0
        self._looks: deque[_Look] = deque()
        self.complete: Callable[[Inspection, Ranks], Inspection] = lambda inspection, ranks: inspection

    def ask(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        """Ask what all ranks of the job are doing; ``answer`` is called with it, after PATIENCE at the latest."""
        from ddplaunch.diagnosis.inspection import Inspection

        self._serial += 1
        nothing = Inspected(self._serial, Inspection(time.time(), (), 0, silent=("node 0",)))
        timer = self._loop.after(PATIENCE, lambda: self.answered(nothing))
        self._open[self._serial] = answer, timer
        self._tell(Inspect(self._serial, detail, _WITHIN))

    def answered(self, message: Inspected) -> None:
        if message.serial in self._open:
            answer, timer = self._open.pop(message.serial)
            timer.cancel()
            answer(replace(message.inspection, node_only=self._node_only))

    def look(self, ranks: Ranks, message: Inspect) -> None:
        """Look at the ranks here, for node 0."""
        from ddplaunch.diagnosis.inspection import Detail

        def looked(inspection: Inspection) -> None:
            if message.detail is Detail.WAITS:
                inspection = self.complete(inspection, ranks)
            self._tell(Inspected(message.serial, inspection))

        self.look_here(ranks, message.detail, looked, message.within - _EARLY)

    def look_here(
        self, ranks: Ranks, detail: Detail, looked: Callable[[Inspection], None], within: float = _WITHIN
    ) -> None:
        """Look at the ranks of this node; ``looked`` gets what was found, after ``within`` seconds at most."""
        self._looks.append(_Look(ranks, detail, looked, time.monotonic() + within))
        if len(self._looks) == 1:
            self._look_next()

    def _look_next(self) -> None:
        from ddplaunch.agent.inspector import Inspector

        look = self._looks[0]
        within = max(0.0, look.until - time.monotonic())
        Inspector(self._loop, look.ranks, look.detail, self._looked, within=within).begin()

    def _looked(self, inspection: Inspection) -> None:
        self._looks.popleft().done(inspection)
        if self._looks:
            self._loop.soon(self._look_next)
