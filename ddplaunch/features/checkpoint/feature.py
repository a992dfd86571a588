"""The newest checkpoint of an attempt: ``--checkpoint``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.checkpoint.options import Checkpoints


class Checkpoint(Feature):
    options = (Checkpoints,)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        pattern = context.options[Checkpoints].checkpoint
        if not pattern:
            return None
        from ddplaunch.features.checkpoint.node import CheckpointFinder

        return CheckpointFinder(pattern, context.job.emit)


FEATURE = Checkpoint()
