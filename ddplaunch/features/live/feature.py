"""The live view: ``run --ui`` and ``ddplaunch top``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.base.tty import can_move_cursor, is_interactive
from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide
from ddplaunch.features.live.options import LiveDisplay

if TYPE_CHECKING:
    from ddplaunch.base.event_loop import EventLoop
    from ddplaunch.base.options import Options
    from ddplaunch.core.node_config import ScreenOptions
    from ddplaunch.core.output.screen import Screen
    from ddplaunch.system.plan.plan import Plan


class Live(Feature):
    requires = ("runs",)
    options = (LiveDisplay,)
    commands = (
        Command(
            "top",
            "Show the live status of a run and its ranks.",
            heading="Watch",
            place=2,
            also=("watch", "monitor"),
        ),
    )

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        why = _why_no_live_view() if options[LiveDisplay].ui else None
        return (f"--ui has no effect: {why}",) if why else ()

    def make_screen(self, loop: EventLoop, options: Options, how: ScreenOptions) -> Screen | None:
        if not options[LiveDisplay].ui or _why_no_live_view():
            return None
        from ddplaunch.features.live.live_screen import LiveScreen

        return LiveScreen(loop, how)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.options[LiveDisplay].ui:
            return None
        from ddplaunch.features.live.live_screen import LiveScreen
        from ddplaunch.features.live.live_view import EmbeddedView

        screen = context.screen
        return EmbeddedView(context.loop, screen, context.job) if isinstance(screen, LiveScreen) else None


def _why_no_live_view() -> str | None:
    """Return why the terminal cannot show the live view; None if it can."""
    if not (is_interactive(1) or is_interactive(2)):
        return "the output is not a terminal"
    if not can_move_cursor():
        return f"TERM={os.environ.get('TERM', '')} cannot move the cursor"
    return None


FEATURE = Live()
