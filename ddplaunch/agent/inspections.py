"""The inspections of this node: people here ask what all ranks do, which node 0 answers; and node 0 asks about ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.messages import FromNode, Inspect, Inspected
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import Loop, Timer
from ddplaunch.output.isolation import IsolatedLoop

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import Ranks
    from ddplaunch.diagnosis.inspection import Detail, Inspection

PATIENCE = 4.0  # seconds for node 0 to answer
_WITHIN = 3.0  # seconds that an inspection of the ranks here takes at most
_EARLY = 0.1  # seconds that an answer needs on its way


@dataclass(frozen=True)
class _Wanted:
    ranks: Ranks
    detail: Detail
    done: Callable[[Inspection], None]
    until: float


class NodeInspections:
    """Those that are open on this node. Its own ranks are inspected once at a time."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[FromNode], None],
        complete: Callable[[Inspection, Ranks], Inspection],
        note: Callable[[str], None],
        *,
        node_only: bool,
    ) -> None:
        """``tell`` tells the job; ``complete`` adds what this node alone knows of its ranks, where it is known who
        waits; ``note`` shows a message to people; ``node_only``: the job is this node alone (``--control none``).
        """
        self._loop, self._tell, self._complete, self._node_only = loop, tell, complete, node_only
        self._note, self._broken = note, False
        self._open: dict[int, tuple[Callable[[Inspection], None], Timer]] = {}
        self._serial = 0
        self._wanted: deque[_Wanted] = deque()

    def ask(self, detail: Detail, answer: Callable[[Inspection], None]) -> None:
        """Ask what all ranks of the job are doing; ``answer`` is called with it, after PATIENCE at the latest."""
        self._serial += 1
        nothing = diagnosis.inspection.Inspection(time.time(), (), 0, silent=("node 0",))
        late = Inspected(self._serial, nothing)
        self._open[self._serial] = answer, self._loop.after(PATIENCE, lambda: self.answered(late))
        self._tell(Inspect(self._serial, detail, _WITHIN))

    def answered(self, message: Inspected) -> None:
        if message.serial in self._open:
            answer, timer = self._open.pop(message.serial)
            timer.cancel()
            answer(replace(message.inspection, node_only=self._node_only))

    def answer(self, ranks: Ranks, message: Inspect) -> None:
        """Inspect the ranks here, for node 0."""

        def found(inspection: Inspection) -> None:
            if message.detail is diagnosis.inspection.Detail.WAITS:
                inspection = self._complete(inspection, ranks)
            self._tell(Inspected(message.serial, inspection))

        self.begin(ranks, message.detail, found, message.within - _EARLY)

    def begin(self, ranks: Ranks, detail: Detail, done: Callable[[Inspection], None], within: float = _WITHIN) -> None:
        """Inspect the ranks of this node; ``done`` gets what was found, after ``within`` seconds at most."""
        self._wanted.append(_Wanted(ranks, detail, done, time.monotonic() + within))
        if len(self._wanted) == 1:
            self._begin_next()

    def _begin_next(self) -> None:
        from ddplaunch.agent.inspector import Inspector

        next_one = self._wanted[0]
        ranks, within = next_one.ranks, max(0.0, next_one.until - time.monotonic())
        if self._broken:
            return self._post_nothing(ranks)
        isolated = IsolatedLoop(self._loop, "the inspection of ranks", self._note, partial(self._failed, ranks))
        inspector = Inspector(isolated, ranks, next_one.detail, self._post, within=within)
        isolated.guard(inspector.begin)()

    def _failed(self, ranks: Ranks) -> None:
        """The inspector has raised an exception: ranks are no longer inspected."""
        self._broken = True
        for line in ranks.lines.values():
            line.rest()
        self._post_nothing(ranks)

    def _post_nothing(self, ranks: Ranks) -> None:
        """Answer all the same: the job may wait for that, to stop the ranks."""
        self._post(diagnosis.inspection.Inspection(time.time(), (), ranks.plan.world_size))

    def _post(self, inspection: Inspection) -> None:
        """Go on outside the isolated loop: an exception of what follows is not the inspector's."""
        self._loop.soon(partial(self._inspected, inspection))

    def _inspected(self, inspection: Inspection) -> None:
        done = self._wanted.popleft().done
        if self._wanted:
            self._loop.soon(self._begin_next)
        done(inspection)  # it may want another at once
