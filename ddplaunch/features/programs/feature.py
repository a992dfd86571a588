"""Programs beside the ranks: ``--sidecar`` and ``--tensorboard``."""

from __future__ import annotations

from shlex import join
from typing import TYPE_CHECKING

from ddplaunch.cli.core_options import Stopping
from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.programs.options import SidecarPrograms

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.features.programs.spec import ProgramSpec
    from ddplaunch.system.plan.plan import Plan


class Programs(Feature):
    options = (SidecarPrograms,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        _read_sidecars(options, plan)
        return ()

    def describe(self, options: Options, plan: Plan, *, is_remote: bool) -> list[str]:
        sidecars = _read_sidecars(options, plan, is_remote=is_remote)
        return [f"sidecar on node 0: {join(each.command)}" for each in sidecars]

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not (sidecars := _read_sidecars(context.options, context.plan)):
            return None
        from ddplaunch.features.programs.node import ProgramRunner
        from ddplaunch.features.programs.sidecars import read_url_patterns

        return ProgramRunner(context, sidecars, read_url_patterns(context.options[SidecarPrograms]))


def _read_sidecars(options: Options, plan: Plan, *, is_remote: bool = False) -> tuple[ProgramSpec, ...]:
    """Return the sidecars of this node; only node 0 has any."""
    if plan.node_rank or not options[SidecarPrograms].are_used:
        return ()
    from ddplaunch.features.programs.sidecars import read_sidecars

    return read_sidecars(options[SidecarPrograms], options[Stopping].grace, is_remote=is_remote)


FEATURE = Programs()
