"""The check of every node before an attempt: ``--check``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.check.options import Checking


class Check(Feature):
    options = (Checking,)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        """Return the side on each node: node 0 alone decides whether nodes are checked."""
        from ddplaunch.features.check.node import NodeChecker

        return NodeChecker(context)


FEATURE = Check()
