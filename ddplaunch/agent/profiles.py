"""The profiles of this node: people here ask for one of all ranks, which node 0 brings; and node 0 asks for ours."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.messages import FromNode, ProfileReply, ProfileRequest
from ddplaunch.loop import EventLoop, Timer

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import NodeRanks

NODE_ZERO_MARGIN_S = 12.0  # seconds, beyond those of the profile, for node 0 to answer


class NodeProfiles:
    """Those that were asked for here, and the one that is taken of this node's ranks."""

    def __init__(self, loop: EventLoop, send: Callable[[FromNode], None]) -> None:
        """``send`` tells the job."""
        self._loop, self._tell = loop, send
        self._open: dict[int, tuple[Callable[[ProfileReply], None], Timer]] = {}
        self._serial = 0

    def profile_job(self, seconds: float, torch: bool, on_profile: Callable[[ProfileReply], None]) -> None:
        """Ask for a profile of all ranks; ``on_profile`` gets that of each, and at last that it is over.

        ``torch``: with that of torch's own profiler.
        """
        self._serial += 1
        late = ProfileReply(self._serial, is_last=True, silent_nodes=("node 0",))
        self._open[self._serial] = (
            on_profile,
            self._loop.call_later(seconds + NODE_ZERO_MARGIN_S, lambda: self.on_reply(late)),
        )
        self._tell(ProfileRequest(self._serial, seconds, torch))

    def on_reply(self, message: ProfileReply) -> None:
        if message.serial not in self._open:
            return
        hear, timer = self._open[message.serial]
        if message.is_last:
            timer.cancel()
            del self._open[message.serial]
        hear(message)

    def on_request(self, ranks: NodeRanks, order: ProfileRequest) -> None:
        """Take a profile of the ranks here, for node 0."""
        from ddplaunch.agent.profiler import RankProfiler

        RankProfiler(
            self._loop,
            ranks,
            order,
            lambda profile: self._tell(ProfileReply(order.serial, profile)),
            lambda: self._tell(ProfileReply(order.serial, is_last=True)),
        ).start()
