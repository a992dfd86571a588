"""Inspection of ranks: on request, on Ctrl-\\ in the launcher's terminal, of a stalled job and before a stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.core.options import Inspecting
from ddplaunch.observe.options import Hangs

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class Inspection(Feature):
    options = (Hangs,)
    requests = ("request",)
    rpc_kinds = ("rpc",)
    messages = ("messages",)

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> tuple[str, ...]:
        return ("--no-inspect: `ddplaunch stacks` will not work",) if options[Inspecting].no_inspect else ()

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.observe.node.inspect_side import InspectSide

        return InspectSide(context)

    def make_job_side(self, context: JobContext) -> JobSide:
        from ddplaunch.observe.job.inspect_job import InspectJob

        return InspectJob(context)


FEATURE = Inspection()
