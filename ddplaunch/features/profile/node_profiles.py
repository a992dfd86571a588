"""Profiles on one node: requests from here to node 0 for all ranks, and from node 0 for this node's ranks."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core.messages import FromNode, ProfileReply, ProfileRequest
from ddplaunch.core.node.node_ranks import NodeRanks
from ddplaunch.features.profile.node import RankProfiler

NODE_ZERO_MARGIN_S = 12.0  # beyond the duration of the profile, for node 0 to reply


class NodeProfiles:
    """All profiles in progress that were requested on this node."""

    def __init__(self, loop: EventLoop, send: Callable[[FromNode], None]) -> None:
        """``send`` sends a control message."""
        self._loop, self._send = loop, send
        self._open: dict[int, tuple[Callable[[ProfileReply], None], Timer]] = {}
        self._serial = 0

    def profile_job(self, seconds: float, torch: bool, on_profile: Callable[[ProfileReply], None]) -> None:
        """Take a profile of all ranks; ``on_profile`` gets one reply for each rank, and a last one at the end.

        ``torch``: run torch's own profiler, too.
        """
        self._serial += 1
        late = ProfileReply(self._serial, is_last=True, silent_nodes=("node 0",))
        self._open[self._serial] = (
            on_profile,
            self._loop.call_later(seconds + NODE_ZERO_MARGIN_S, lambda: self.on_reply(late)),
        )
        self._send(ProfileRequest(self._serial, seconds, torch))

    def on_reply(self, message: ProfileReply) -> None:
        if message.serial not in self._open:
            return
        on_profile, timer = self._open[message.serial]
        if message.is_last:
            timer.cancel()
            del self._open[message.serial]
        on_profile(message)

    def on_request(self, ranks: NodeRanks, order: ProfileRequest) -> None:
        """Take a profile of this node's ranks for node 0."""

        RankProfiler(
            self._loop,
            ranks,
            order,
            lambda profile: self._send(ProfileReply(order.serial, profile)),
            lambda: self._send(ProfileReply(order.serial, is_last=True)),
        ).start()
