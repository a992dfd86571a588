"""Preloading of what the program imports: ``--preload``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.preload.options import Preloading

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.core.zygote_plan import ZygotePlan
    from ddplaunch.system.plan.plan import Plan


class Preload(Feature):
    options = (Preloading,)

    def plan_zygote(self, options: Options, plan: Plan, zygote_plan: ZygotePlan) -> ZygotePlan:
        from ddplaunch.features.preload.preload_plan import choose_zygote_plan

        return choose_zygote_plan(options, plan)

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.preload.node import SlowStartNotes

        return SlowStartNotes(context.config.zygote.plan, context.plan.target.source, context.screen.show_note)


FEATURE = Preload()
