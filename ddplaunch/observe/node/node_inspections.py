"""Inspections of one node's ranks, one after the other: for node 0, and for features on this node."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.rpc_kind import Reply
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProgramInspection
from ddplaunch.observe.node.rank_inspector import RankInspector

LOCAL_TIMEOUT_S = 3.0  # for an inspection of this node's ranks
_REPLY_MARGIN_S = 0.1  # for the transfer of a reply


class _QueuedInspection(Struct, frozen=True):
    ranks: NodeRanks
    detail: Detail
    on_done: Callable[[Inspection], None]
    deadline: float


class NodeInspections:
    """Inspects the ranks of this node on request, one request after the other."""

    def __init__(
        self,
        loop: EventLoop,
        add_local_facts: Callable[[Inspection, NodeRanks], Inspection],
        inspect_programs: Callable[[], tuple[ProgramInspection, ...]],
        note: Callable[[str], None],
        *,
        node_only: bool,
    ) -> None:
        """``note`` shows a message to the user. ``inspect_programs`` inspects the programs beside this node's ranks.

        ``add_local_facts`` adds to an inspection of waits what only this node knows of its ranks. ``node_only``: there
        is no coordinator, so inspections see this node alone (``--control none``).
        """
        self._loop, self._add_local_facts, self._node_only = loop, add_local_facts, node_only
        self._inspect_programs = inspect_programs
        self._note, self._broken = note, False
        self._queue: deque[_QueuedInspection] = deque()

    def answer(self, loop: EventLoop, ranks: NodeRanks, request: RpcRequest, reply: Reply) -> None:
        """Inspect this node's ranks on a request of node 0, and reply."""

        def on_done(inspection: Inspection) -> None:
            if request.payload is Detail.WAITS:
                inspection = self._add_local_facts(inspection, ranks)
            reply(replace(inspection, node_only=self._node_only, programs=self._inspect_programs()), True)

        self.inspect_local(ranks, request.payload, on_done, request.timeout_s - _REPLY_MARGIN_S)

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
            return self._post_empty_inspection(ranks)
        isolated = IsolatedLoop(self._loop, "the inspection of ranks", self._note)
        isolated.on_error = partial(self._failed, ranks)
        inspector = RankInspector(isolated, ranks, request.detail, self._post, timeout_s=timeout_s)
        isolated.guard(inspector.begin)()

    def _failed(self, ranks: NodeRanks) -> None:
        """Called after an exception in the inspector: do not inspect ranks any more."""
        self._broken = True
        for channel in ranks.channels.values():
            channel.clear_reply_handler()
        self._post_empty_inspection(ranks)

    def _post_empty_inspection(self, ranks: NodeRanks) -> None:
        """Reply with an empty inspection: the coordinator may be waiting for it before it stops the ranks."""
        self._post(Inspection(time.time(), (), ranks.plan.world_size))

    def _post(self, inspection: Inspection) -> None:
        """Call ``on_done`` from the launcher's event loop: an exception in it must not count as the inspector's."""
        self._loop.call_soon(partial(self._on_inspected, inspection))

    def _on_inspected(self, inspection: Inspection) -> None:
        on_done = self._queue.popleft().on_done
        if self._queue:
            self._loop.call_soon(self._start_next)
        on_done(inspection)  # it may request another inspection at once
