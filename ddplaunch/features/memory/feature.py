"""Memory: the report of a rank that ran out of memory names the limit, and who used the memory; ``--oom-report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.base.errors import UsageError
from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.memory.options import MemoryReport
from ddplaunch.system.target.target import TargetKind

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class Memory(Feature):
    options = (MemoryReport,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if not options[MemoryReport].oom_report:
            return ()
        from ddplaunch.system.target.versions import cpu_only_torch

        if plan.target.kind is TargetKind.PROGRAM:
            raise UsageError("--oom-report works only with Python", "leave --oom-report out, or name a Python program")
        if built := cpu_only_torch():
            raise UsageError(
                f"--oom-report needs a torch for CUDA or ROCm; this is {built}, for CPUs only", "leave --oom-report out"
            )
        return ()

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.memory.node import MemorySide

        return MemorySide(context)


FEATURE = Memory()
