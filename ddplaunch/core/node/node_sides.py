"""The node sides of all features in one launcher, isolated from the job and from each other."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.events import Event
from ddplaunch.core.feature import Feature, FeatureContext, NodeSide, load_features
from ddplaunch.core.output.isolation import IsolatedLoop


class NodeSides:
    """Makes the sides, and passes calls on to them; one that raises is reported once, and the job goes on."""

    def __init__(
        self,
        loop: EventLoop,
        make_context: Callable[[IsolatedLoop, tuple[NodeSide, ...]], FeatureContext],
        report: Callable[[str], object],
    ) -> None:
        """``make_context`` gets the loop of a feature and the sides made before; ``report`` gets messages on bugs."""
        self._loop, self._report = loop, report
        self._sides: list[tuple[str, NodeSide]] = []
        self._observe: list[Callable[[Event], None]] = []
        self._on_inspect_key: list[Callable[[], None]] = []
        for name, feature in load_features():
            context = make_context(self._isolated(name), tuple(side for _, side in self._sides))
            context.loop.guard(self._add)(name, feature, context)

    def _add(self, name: str, feature: Feature, context: FeatureContext) -> None:
        if (side := feature.make_node_side(context)) is not None:
            self._sides.append((name, side))
            self._observe.append(context.loop.guard(side.observe))
            self._on_inspect_key.append(context.loop.guard(side.on_inspect_key))

    def _isolated(self, name: str) -> IsolatedLoop:
        return IsolatedLoop(self._loop, f"the feature {name}", self._report)

    def observe(self, event: Event) -> None:
        for observe in self._observe:
            observe(event)

    def on_inspect_key(self) -> None:
        for on_key in self._on_inspect_key:
            on_key()

    def close(self) -> None:
        """Close all sides, also those that have raised."""
        for name, side in self._sides:
            self._isolated(name).guard(side.close)()

    def finish(self) -> None:
        """Wait for all sides, also for those that have raised."""
        for name, side in self._sides:
            self._isolated(name).guard(side.finish)()
