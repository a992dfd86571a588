"""The live view: ``run --ui`` and ``ddplaunch top``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide
from ddplaunch.features.live.options import LiveDisplay

if TYPE_CHECKING:
    from ddplaunch.base.event_loop import EventLoop
    from ddplaunch.core.node_config import NodeConfig
    from ddplaunch.core.output.screen import Screen, ScreenOptions


class Live(Feature):
    requires = ("ssh", "inspect", "samples", "runs")
    options = (LiveDisplay,)
    commands = (Command("top", "Show the live status of a running job and its ranks."),)

    def make_screen(
        self, loop: EventLoop, config: NodeConfig, options: ScreenOptions, *, reports_job: bool
    ) -> Screen | None:
        if not config.has_live_view:
            return None
        from ddplaunch.features.live.live_screen import LiveScreen

        return LiveScreen(loop, options, reports_job=reports_job, colour=config.colour)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.has_live_view:
            return None
        from ddplaunch.features.live.live_screen import LiveScreen
        from ddplaunch.features.live.live_view import EmbeddedView

        screen = context.screen
        return EmbeddedView(context.loop, screen, context.job) if isinstance(screen, LiveScreen) else None


FEATURE = Live()
