"""The debugger: in the launcher's terminal, and ``ddplaunch debug``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_rank_range
from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide
from ddplaunch.features.debug.options import Debugging

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class Debug(Feature):
    options = (Debugging,)
    commands = (
        Command("debug", "Attach to the debugger of the ranks, or pause a rank.", heading="Diagnose", also=("pdb",)),
    )
    requests = ("request",)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        ranks = options[Debugging].debugpy_ranks()
        if ranks and plan.nnodes == 1 and max(ranks) >= plan.world_size:  # with several, nodes may differ in ranks
            what = f"--debugpy {max(ranks)}: the job has {format_rank_range(0, plan.world_size - 1)}"
            raise UsageError(what, "--debugpy 0")
        return ()

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.debug.node import DebugSide

        return DebugSide(context)


FEATURE = Debug()
