"""Commands that are run on events: ``--notify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.notify.options import Notifications, read_commands

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class Notify(Feature):
    options = (Notifications,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if not plan.node_rank:
            read_commands(options)
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
        commands = () if plan.node_rank else read_commands(options, is_remote=is_remote)
        return [f"notified of events: {each.command_text}" for each in commands]

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.options[Notifications].notify or context.plan.node_rank:
            return None
        from ddplaunch.features.notify.node import NotifyObserver

        return NotifyObserver(context, read_commands(context.options))


FEATURE = Notify()
