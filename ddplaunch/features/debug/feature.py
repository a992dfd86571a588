"""The debugger: in the launcher's terminal, and ``ddplaunch debug``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide
from ddplaunch.features.debug.options import Debugging


class Debug(Feature):
    requires = ("inspect", "ssh")
    options = (Debugging,)
    commands = (Command("debug", "Attach to the debugger of the ranks, or pause a rank."),)
    requests = ("request",)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.has_debug_prompt:
            return None
        from ddplaunch.core.output.screen import TerminalScreen
        from ddplaunch.features.debug.launcher_terminal import LauncherTerminal

        screen = context.screen
        return LauncherTerminal(context, screen) if isinstance(screen, TerminalScreen) else None


FEATURE = Debug()
