"""The feature that detects nodes of a Slurm step that ended before they joined the job."""

from __future__ import annotations

import os

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide


class SlurmStep(Feature):
    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if "SLURM_STEP_ID" not in os.environ:
            return None
        from ddplaunch.features.slurm_step.node import JoinWatcher, is_step_of_job

        if not is_step_of_job(context.options, context.cluster_env, context.plan.node_rank):
            return None
        return JoinWatcher(context)


FEATURE = SlurmStep()
