"""The inspections of this node: people here ask what all ranks do, which node 0 answers; and node 0 asks about ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.control.messages import FromNode, InspectReply, InspectRequest
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import EventLoop, Timer
from ddplaunch.output.isolation import IsolatedLoop

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import NodeRanks
    from ddplaunch.diagnosis.inspection import Detail, Inspection

NODE_ZERO_TIMEOUT_S = 4.0  # seconds for node 0 to answer
LOCAL_TIMEOUT_S = 3.0  # seconds that an inspection of the ranks here takes at most
_REPLY_MARGIN_S = 0.1  # seconds that an answer needs on its way


@dataclass(frozen=True)
class _QueuedInspection:
    ranks: NodeRanks
    detail: Detail
    done: Callable[[Inspection], None]
    until: float


class NodeInspections:
    """Those that are open on this node. Its own ranks are inspected once at a time."""

    def __init__(
        self,
        loop: EventLoop,
        send: Callable[[FromNode], None],
        add_local_facts: Callable[[Inspection, NodeRanks], Inspection],
        note: Callable[[str], None],
        *,
        node_only: bool,
    ) -> None:
        """``send`` tells the job; ``add_local_facts`` adds what this node alone knows of its ranks, where it is known who
        waits; ``note`` shows a message to people; ``node_only``: the job is this node alone (``--control none``).
        """
        self._loop, self._tell, self._complete, self._node_only = loop, send, add_local_facts, node_only
        self._note, self._broken = note, False
        self._open: dict[int, tuple[Callable[[Inspection], None], Timer]] = {}
        self._serial = 0
        self._wanted: deque[_QueuedInspection] = deque()

    def inspect_job(self, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
        """Ask what all ranks of the job are doing; ``answer`` is called with it, after NODE_ZERO_TIMEOUT_S at the latest."""
        self._serial += 1
        nothing = diagnosis.inspection.Inspection(time.time(), (), 0, silent=("node 0",))
        late = InspectReply(self._serial, nothing)
        self._open[self._serial] = on_done, self._loop.call_later(NODE_ZERO_TIMEOUT_S, lambda: self.on_reply(late))
        self._tell(InspectRequest(self._serial, detail, LOCAL_TIMEOUT_S))

    def on_reply(self, message: InspectReply) -> None:
        if message.serial in self._open:
            answer, timer = self._open.pop(message.serial)
            timer.cancel()
            answer(replace(message.inspection, node_only=self._node_only))

    def on_request(self, ranks: NodeRanks, message: InspectRequest) -> None:
        """Inspect the ranks here, for node 0."""

        def found(inspection: Inspection) -> None:
            if message.detail is diagnosis.inspection.Detail.WAITS:
                inspection = self._complete(inspection, ranks)
            self._tell(InspectReply(message.serial, inspection))

        self.inspect_local(ranks, message.detail, found, message.timeout_s - _REPLY_MARGIN_S)

    def inspect_local(
        self,
        ranks: NodeRanks,
        detail: Detail,
        on_done: Callable[[Inspection], None],
        timeout_s: float = LOCAL_TIMEOUT_S,
    ) -> None:
        """Inspect the ranks of this node; ``on_done`` gets what was found, after ``timeout_s`` seconds at most."""
        self._wanted.append(_QueuedInspection(ranks, detail, on_done, time.monotonic() + timeout_s))
        if len(self._wanted) == 1:
            self._start_next()

    def _start_next(self) -> None:
        from ddplaunch.agent.inspector import RankInspector

        next_one = self._wanted[0]
        ranks, within = next_one.ranks, max(0.0, next_one.until - time.monotonic())
        if self._broken:
            return self._post_nothing(ranks)
        isolated = IsolatedLoop(self._loop, "the inspection of ranks", self._note, partial(self._failed, ranks))
        inspector = RankInspector(isolated, ranks, next_one.detail, self._post, timeout_s=within)
        isolated.guard(inspector.begin)()

    def _failed(self, ranks: NodeRanks) -> None:
        """The inspector has raised an exception: ranks are no longer inspected."""
        self._broken = True
        for line in ranks.channels.values():
            line.clear_reply_handler()
        self._post_nothing(ranks)

    def _post_nothing(self, ranks: NodeRanks) -> None:
        """Answer all the same: the job may wait for that, to stop the ranks."""
        self._post(diagnosis.inspection.Inspection(time.time(), (), ranks.plan.world_size))

    def _post(self, inspection: Inspection) -> None:
        """Go on outside the isolated loop: an exception of what follows is not the inspector's."""
        self._loop.call_soon(partial(self._on_inspected, inspection))

    def _on_inspected(self, inspection: Inspection) -> None:
        done = self._wanted.popleft().done
        if self._wanted:
            self._loop.call_soon(self._start_next)
        done(inspection)  # it may want another at once
