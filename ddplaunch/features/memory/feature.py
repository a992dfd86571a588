"""Memory: the report of a rank that ran out of memory names the limit, and the ranks that used it."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class Memory(Feature):
    requires = ("samples",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.memory.node import MemorySide
        from ddplaunch.features.samples.node import SampleCollector

        memory = MemorySide(context)
        if samples := context.find(SampleCollector):
            samples.add_listener(context.loop.guard(memory.on_sample))
        return memory


FEATURE = Memory()
