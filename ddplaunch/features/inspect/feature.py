"""Inspection: ``ddplaunch stacks``, and Ctrl-\\ in the launcher's terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.core.feature import Command, Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.inspect.options import Hangs, Inspecting

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.core.job_config import JobConfig
    from ddplaunch.system.plan.plan import Plan


class Inspect(Feature):
    options = (Inspecting, Hangs)
    commands = (Command("stacks", "Show the stacks of all ranks and which ranks wait for which.", heading="Diagnose"),)
    requests = ("request",)
    rpc_kinds = ("rpc",)
    messages = ("messages",)

    def configure_job(self, config: JobConfig, options: Options) -> JobConfig:
        return replace(config, inspect=not options[Inspecting].no_inspect)

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> tuple[str, ...]:
        return ("--no-inspect: `ddplaunch stacks` will not work",) if options[Inspecting].no_inspect else ()

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.inspect.node.inspect_side import InspectSide

        return InspectSide(context)

    def make_job_side(self, context: JobContext) -> JobSide:
        from ddplaunch.features.inspect.job.inspect_job import InspectJob

        return InspectJob(context)


FEATURE = Inspect()
