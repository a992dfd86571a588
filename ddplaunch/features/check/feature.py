"""The check of every node before its ranks start: ``--check``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.check.options import Checking


class Check(Feature):
    options = (Checking,)
    messages = ("messages",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        """Return the side on each node: node 0 alone decides whether nodes are checked."""
        from ddplaunch.features.check.node import NodeChecker

        return NodeChecker(context)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        checking = context.options[Checking]
        if not checking.check:
            return None
        from ddplaunch.features.check.job import CheckJob

        return CheckJob(checking.gpu_memory_timeout_s)


FEATURE = Check()
