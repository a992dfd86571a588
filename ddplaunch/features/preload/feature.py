"""Preloading of what the program imports: ``--preload``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class Preload(Feature):
    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.preload.node import SlowStartNotes

        return SlowStartNotes(context.config.preload, context.plan.target.source, context.screen.show_note)


FEATURE = Preload()
