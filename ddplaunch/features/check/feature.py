"""The check of every node before its ranks start: ``--check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.check.options import Checking

if TYPE_CHECKING:
    from ddplaunch.core.job_config import JobConfig
    from ddplaunch.core.options import Options


class Check(Feature):
    options = (Checking,)
    messages = ("messages",)

    def configure_job(self, config: JobConfig, options: Options) -> JobConfig:
        timeout = options[Checking].gpu_memory_timeout
        return replace(
            config,
            checks_nodes=options[Checking].check,
            gpu_memory_timeout=config.gpu_memory_timeout if timeout is None else timeout,
        )

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        """Return the side on each node: node 0 alone decides whether nodes are checked."""
        from ddplaunch.features.check.node import NodeChecker

        return NodeChecker(context)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        if not context.config.checks_nodes:
            return None
        from ddplaunch.features.check.job import CheckJob

        return CheckJob(context.config.gpu_memory_timeout)


FEATURE = Check()
