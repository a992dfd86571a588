"""Programs alongside the ranks: ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.programs.options import SidecarPrograms

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.features.programs.sidecars import Sidecar
    from ddplaunch.system.plan.plan import Plan


class Sidecars(Feature):
    options = (SidecarPrograms,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        _read_sidecars(options, plan)
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
        sidecars = _read_sidecars(options, plan, is_remote=is_remote)
        return [f"sidecar on node 0: {each.command_text}" for each in sidecars]

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not (sidecars := _read_sidecars(context.options, context.plan)):
            return None
        from ddplaunch.features.programs.node import SidecarRunner

        return SidecarRunner(context, sidecars)


def _read_sidecars(options: Options, plan: Plan, *, is_remote: bool = False) -> tuple[Sidecar, ...]:
    """Return the sidecars of this node; only node 0 has any."""
    if plan.node_rank or not options[SidecarPrograms].are_used:
        return ()
    from ddplaunch.features.programs.sidecars import read_sidecars

    return read_sidecars(options[SidecarPrograms], is_remote=is_remote)


FEATURE = Sidecars()
