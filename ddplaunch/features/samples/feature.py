"""Samples of the usage of ranks, for features that subscribe to them."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class Samples(Feature):
    requires = ("inspect",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.samples.node import SampleCollector

        inspect = context.job.inspect_node if context.config.inspect else None
        samples = SampleCollector(context.loop, inspect, context.emit)
        samples.add_listener(context.tree.report_stopped_zygote)
        return samples


FEATURE = Samples()
