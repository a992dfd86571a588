"""Memory: the report of a rank that ran out of memory names the limit, and the ranks that used it."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class Memory(Feature):
    requires = ("samples",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.memory.node import MemorySide

        return MemorySide(context)


FEATURE = Memory()
