"""Commands that are run on events: ``--notify``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.notify.options import Notifications


class Notify(Feature):
    options = (Notifications,)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.notify:
            return None
        from ddplaunch.features.notify.node import NotifyObserver

        return NotifyObserver(context.loop, context.plan, context.config.notify, context.screen)


FEATURE = Notify()
