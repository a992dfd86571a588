"""Inspections on one node: requests from here to node 0 about all ranks, and from node 0 about this node's ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core.messages import FromNode, InspectReply, InspectRequest
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.core.output.isolation import IsolatedLoop
from ddplaunch.features.inspect.diagnosis.inspection import Detail, Inspection
from ddplaunch.features.inspect.node.rank_inspector import RankInspector

NODE_ZERO_TIMEOUT_S = 4.0  # for node 0 to reply
LOCAL_TIMEOUT_S = 3.0  # for an inspection of this node's ranks
_REPLY_MARGIN_S = 0.1  # for the transfer of a reply


class _QueuedInspection(Struct, frozen=True):
    ranks: NodeRanks
    detail: Detail
    on_done: Callable[[Inspection], None]
    deadline: float


class NodeInspections:
    """All inspections in progress on this node; its own ranks are inspected one request after the other."""

    def __init__(
        self,
        loop: EventLoop,
        send: Callable[[FromNode], None],
        add_local_facts: Callable[[Inspection, NodeRanks], Inspection],
        note: Callable[[str], None],
        *,
        node_only: bool,
    ) -> None:
        """``send`` sends a control message; ``note`` shows a message to the user.

        ``add_local_facts`` adds to an inspection of waits what only this node knows of its ranks. ``node_only``: there
        is no coordinator, so inspections see this node alone (``--control none``).
        """
        self._loop, self._send, self._add_local_facts, self._node_only = loop, send, add_local_facts, node_only
        self._note, self._broken = note, False
        self._open: dict[int, tuple[Callable[[Inspection], None], Timer]] = {}
        self._serial = 0
        self._queue: deque[_QueuedInspection] = deque()

    def inspect_job(self, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
        """Inspect all ranks of the job; ``on_done`` gets the result, after ``NODE_ZERO_TIMEOUT_S`` at the latest."""
        self._serial += 1
        nothing = Inspection(time.time(), (), 0, silent=("node 0",))
        late = InspectReply(self._serial, nothing)
        self._open[self._serial] = on_done, self._loop.call_later(NODE_ZERO_TIMEOUT_S, lambda: self.on_reply(late))
        self._send(InspectRequest(self._serial, detail, LOCAL_TIMEOUT_S))

    def on_reply(self, message: InspectReply) -> None:
        if message.serial in self._open:
            on_done, timer = self._open.pop(message.serial)
            timer.cancel()
            on_done(replace(message.inspection, node_only=self._node_only))

    def on_request(self, ranks: NodeRanks, message: InspectRequest) -> None:
        """Inspect this node's ranks for node 0."""

        def on_done(inspection: Inspection) -> None:
            if message.detail is Detail.WAITS:
                inspection = self._add_local_facts(inspection, ranks)
            self._send(InspectReply(message.serial, inspection))

        self.inspect_local(ranks, message.detail, on_done, message.timeout_s - _REPLY_MARGIN_S)

    def inspect_local(
        self,
        ranks: NodeRanks,
        detail: Detail,
        on_done: Callable[[Inspection], None],
        timeout_s: float = LOCAL_TIMEOUT_S,
    ) -> None:
        """Inspect ranks of this node; ``on_done`` gets the inspection, after ``timeout_s`` seconds at most."""
        self._queue.append(_QueuedInspection(ranks, detail, on_done, time.monotonic() + timeout_s))
        if len(self._queue) == 1:
            self._start_next()

    def _start_next(self) -> None:
        request = self._queue[0]
        ranks, timeout_s = request.ranks, max(0.0, request.deadline - time.monotonic())
        if self._broken:
            return self._post_nothing(ranks)
        isolated = IsolatedLoop(self._loop, "the inspection of ranks", self._note, partial(self._failed, ranks))
        inspector = RankInspector(isolated, ranks, request.detail, self._post, timeout_s=timeout_s)
        isolated.guard(inspector.begin)()

    def _failed(self, ranks: NodeRanks) -> None:
        """The inspector raised an exception: do not inspect ranks any more."""
        self._broken = True
        for channel in ranks.channels.values():
            channel.clear_reply_handler()
        self._post_nothing(ranks)

    def _post_nothing(self, ranks: NodeRanks) -> None:
        """Reply with an empty inspection: the coordinator may be waiting for it before it stops the ranks."""
        self._post(Inspection(time.time(), (), ranks.plan.world_size))

    def _post(self, inspection: Inspection) -> None:
        """Continue outside the isolated loop: an exception in ``on_done`` is not the inspector's."""
        self._loop.call_soon(partial(self._on_inspected, inspection))

    def _on_inspected(self, inspection: Inspection) -> None:
        on_done = self._queue.popleft().on_done
        if self._queue:
            self._loop.call_soon(self._start_next)
        on_done(inspection)  # it may request another inspection at once
