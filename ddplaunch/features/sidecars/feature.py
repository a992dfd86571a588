"""Programs beside the ranks: ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.sidecars.options import SidecarPrograms


class Sidecars(Feature):
    options = (SidecarPrograms,)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.sidecars:
            return None
        from ddplaunch.features.sidecars.node import SidecarRunner

        return SidecarRunner(context)


FEATURE = Sidecars()
