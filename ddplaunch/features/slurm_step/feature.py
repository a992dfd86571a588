"""Nodes of a Slurm step that ended before they joined the job."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class SlurmStep(Feature):
    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.in_slurm_step:
            return None
        from ddplaunch.features.slurm_step.node import JoinWatcher

        return JoinWatcher(context)


FEATURE = SlurmStep()
