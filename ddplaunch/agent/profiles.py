"""The profiles of this node: people here ask for one of all ranks, which node 0 brings; and node 0 asks for ours."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch import TYPE_CHECKING
from ddplaunch.control.messages import FromNode, Profiled, TakeProfile
from ddplaunch.loop import Loop, Timer

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import Ranks

PATIENCE = 12.0  # seconds, beyond those of the profile, for node 0 to answer


class NodeProfiles:
    """Those that were asked for here, and the one that is taken of this node's ranks."""

    def __init__(self, loop: Loop, tell: Callable[[FromNode], None]) -> None:
        """``tell`` tells the job."""
        self._loop, self._tell = loop, tell
        self._open: dict[int, tuple[Callable[[Profiled], None], Timer]] = {}
        self._serial = 0

    def ask(self, seconds: float, torch: bool, hear: Callable[[Profiled], None]) -> None:
        """Ask for a profile of all ranks; ``hear`` gets that of each, and at last that it is over.

        ``torch``: with that of torch's own profiler.
        """
        self._serial += 1
        late = Profiled(self._serial, over=True, silent=("node 0",))
        self._open[self._serial] = hear, self._loop.after(seconds + PATIENCE, lambda: self.answered(late))
        self._tell(TakeProfile(self._serial, seconds, torch))

    def answered(self, message: Profiled) -> None:
        if message.serial not in self._open:
            return
        hear, timer = self._open[message.serial]
        if message.over:
            timer.cancel()
            del self._open[message.serial]
        hear(message)

    def take(self, ranks: Ranks, order: TakeProfile) -> None:
        """Take a profile of the ranks here, for node 0."""
        from ddplaunch.agent.profiler import Profiler

        Profiler(
            self._loop,
            ranks,
            order,
            lambda profile: self._tell(Profiled(order.serial, profile)),
            lambda: self._tell(Profiled(order.serial, over=True)),
        ).begin()
