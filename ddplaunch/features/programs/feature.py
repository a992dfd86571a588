"""Programs beside the ranks: ``--command … : train.py``, job files, ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddplaunch.core.feature import Feature, FeatureContext, JobContext, JobSide, NodeSide
from ddplaunch.features.programs.options import ProgramOptions

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan
    from ddplaunch.system.plan.planner import PlanSpec
    from ddplaunch.system.target.target import Target


class OtherPrograms(Feature):
    options = (ProgramOptions,)
    messages = ("messages",)

    def rewrite_words(self, words: list[str], known: Mapping[str, bool]) -> list[str]:
        is_used = ":" in words or "--command" in words or any(word.endswith(".toml") for word in words)
        return _wiring().rewrite_words(words, known) if is_used else words

    def adjust_spec(self, options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
        is_used = options[ProgramOptions].program
        return _wiring().complete_spec(options, spec, target, is_remote=is_remote) if is_used else spec

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if options[ProgramOptions].are_used:
            _wiring().check_start(options, plan, is_remote=False)
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
        if not options[ProgramOptions].are_used:
            return []
        _wiring().check_start(options, plan, is_remote=is_remote)
        notes: list[str] = _wiring().describe(options, plan, is_remote=is_remote)
        return notes

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        return _wiring().make_node_side(context) if context.options[ProgramOptions].are_used else None

    def make_job_side(self, context: JobContext) -> JobSide | None:
        return _wiring().make_job_side(context) if context.options[ProgramOptions].program else None


def _wiring() -> Any:
    """Import the rest of the folder, which a job without other programs does not need."""
    from ddplaunch.features.programs import wiring

    assert isinstance(wiring, ModuleType)
    return wiring


FEATURE = OtherPrograms()
