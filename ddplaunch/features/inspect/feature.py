"""Inspection: ``ddplaunch stacks``, and Ctrl-\\ in the launcher's terminal."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, FeatureContext, JobContext, JobSide, NodeSide


class Inspect(Feature):
    commands = (Command("stacks", "Show the stacks of all ranks and which ranks wait for which."),)
    requests = ("request",)
    rpc_kinds = ("rpc",)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.inspect.inspect_key import InspectOnKey

        return InspectOnKey(context)

    def make_job_side(self, context: JobContext) -> JobSide:
        from ddplaunch.features.inspect.job.inspect_job import InspectJob

        return InspectJob(context)


FEATURE = Inspect()
