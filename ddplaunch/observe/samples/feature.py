"""Samples of the usage of ranks, for features that subscribe to them."""

from __future__ import annotations

from functools import partial

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class Samples(Feature):
    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.observe.node.inspect_side import InspectSide
        from ddplaunch.observe.node.programs import inspect_programs
        from ddplaunch.observe.samples.node import SampleCollector

        side = context.find(InspectSide) if context.config.inspect else None
        inspect = partial(side.inspect, context.loop) if side else None
        samples = SampleCollector(
            context.loop,
            inspect,
            context.job.emit,
            lambda: inspect_programs(context.job.status().programs, context.node.streams),
        )
        samples.add_listener(context.tree.report_stopped_zygote)
        return samples


FEATURE = Samples()
