"""Memory: the report of a rank that ran out of memory names the limit, and the ranks that used it; ``--oom-report``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.memory.options import MemoryReport


class Memory(Feature):
    requires = ("samples",)
    options = (MemoryReport,)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.memory.node import MemorySide

        return MemorySide(context)


FEATURE = Memory()
