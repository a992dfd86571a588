"""Keeps the evidence of torch and NCCL about a stalled job in the folder of the run."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide


class Nccl(Feature):
    requires = ("runs",)
    rpc_kinds = ("rpc",)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.inspect:
            return None
        from ddplaunch.features.nccl.node import StallSide

        return StallSide(context)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        from ddplaunch.features.nccl.job import StallJob

        return StallJob(context)


FEATURE = Nccl()
