"""The check of every node before its ranks start: ``--check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.check.options import Checking

if TYPE_CHECKING:
    from ddplaunch.features.check.messages import CheckNode


class CheckJob(JobSide):
    """Requests the check of every node before each attempt."""

    def __init__(self, gpu_memory_timeout: float) -> None:
        self._gpu_memory_timeout = gpu_memory_timeout

    def before_start(self, attempt: int) -> CheckNode:
        from ddplaunch.features.check.messages import CheckNode

        return CheckNode(attempt, self._gpu_memory_timeout)


class Check(Feature):
    options = (Checking,)
    messages = ("messages",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        """Return the node side on every node: node 0 alone decides whether nodes are checked."""
        from ddplaunch.features.check.node import CheckSide

        return CheckSide(context)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        checking = context.options[Checking]
        return CheckJob(checking.gpu_memory_timeout_s) if checking.check else None


FEATURE = Check()
