"""Programs beside the ranks: ``--command … : train.py``, job files, ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.programs.options import ProgramOptions

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.core.job_config import JobConfig
    from ddplaunch.core.zygote_plan import ZygotePlan
    from ddplaunch.system.plan.plan import Plan
    from ddplaunch.system.plan.planner import PlanSpec
    from ddplaunch.system.target.target import Target


class OtherPrograms(Feature):
    options = (ProgramOptions,)
    messages = ("messages",)
    requests = ("request",)

    def rewrite_words(self, words: list[str], known: Mapping[str, bool]) -> list[str]:
        if ":" in words or "--command" in words or any(word.endswith(".toml") for word in words):
            from ddplaunch.features.programs.words import rewrite_words

            words = rewrite_words(words, known)
        if any(word.partition("=")[0] == "--services" for word in words):
            from ddplaunch.features.programs.services import use_services

            words = use_services(words, known)
        return words

    def adjust_spec(self, options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
        if not options[ProgramOptions].program:
            return spec
        from ddplaunch.features.programs.wiring import complete_spec

        return complete_spec(options, spec, target, is_remote=is_remote)

    def configure_job(self, config: JobConfig, options: Options) -> JobConfig:
        if not options[ProgramOptions].program:
            return config
        from ddplaunch.features.programs.wiring import configure_job

        return configure_job(config, options)

    def plan_zygote(self, options: Options, plan: Plan, zygote_plan: ZygotePlan) -> ZygotePlan:
        """Return a zygote plan without imports on a node that runs no ranks."""
        if not options[ProgramOptions].program:
            return zygote_plan
        from ddplaunch.core.zygote_plan import ZygotePlan
        from ddplaunch.features.programs.wiring import is_without_ranks

        return ZygotePlan(source="no ranks here") if is_without_ranks(options, plan) else zygote_plan

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if options[ProgramOptions].are_used:
            from ddplaunch.features.programs.wiring import check_start

            check_start(options, plan, is_remote=False)
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
        if not options[ProgramOptions].are_used:
            return []
        from ddplaunch.features.programs.wiring import check_start, describe

        check_start(options, plan, is_remote=is_remote)
        return describe(options, plan, is_remote=is_remote)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.options[ProgramOptions].are_used:
            return None
        from ddplaunch.features.programs.wiring import make_node_side

        return make_node_side(context)

    def make_job_side(self, context: JobContext) -> JobSide | None:
        if not context.options[ProgramOptions].program:
            return None
        from ddplaunch.features.programs.wiring import make_job_side

        return make_job_side(context)


FEATURE = OtherPrograms()
