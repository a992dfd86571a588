"""Reserving this machine's GPUs and CPUs: ``--gpus free:2``, ``--jobs`` and ``--wait``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, NodeSide
from ddplaunch.core.options import RanksPerNode, wants_free_gpus
from ddplaunch.features.reservations.options import Reservations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.base.options import Options
    from ddplaunch.core.agent.zygote_process import ZygoteSource
    from ddplaunch.core.feature import FeatureContext
    from ddplaunch.features.reservations.claims import OwnClaim
    from ddplaunch.features.reservations.early_zygote import EarlyZygote
    from ddplaunch.system.plan.plan import Plan
    from ddplaunch.system.plan.planner import PlanSpec
    from ddplaunch.system.target.target import Target


class ReserveDevices(Feature):
    options = (Reservations,)

    def __init__(self) -> None:
        self._held: list[OwnClaim] = []  # until this process ends
        self._early: EarlyZygote | None = None

    def adjust_spec(self, options: Options, spec: PlanSpec, target: Target, *, is_remote: bool) -> PlanSpec:
        if not (
            options[Reservations].jobs
            or wants_free_gpus(options[RanksPerNode].gpus)
            or "DDPLAUNCH_START_FILE" in os.environ
        ):
            return spec
        from ddplaunch.features.reservations.command_line import complete_spec

        def start_early(spec: PlanSpec) -> None:
            from ddplaunch.features.reservations import early_zygote

            self._early = self._early or early_zygote.start_early(options, spec, target)

        return complete_spec(options, spec, is_remote=is_remote, keep=self._keep_claim, on_next=start_early)

    def make_zygote_source(self, options: Options) -> ZygoteSource | None:
        """Return the source of the zygote that was started while the run waited."""
        return self._early

    def check(self, options: Options, plan: Plan) -> Iterable[str]:
        """Claim the GPUs of a job that has not reserved any."""
        if not plan.gpu_addresses or plan.started_rank or wants_free_gpus(options[RanksPerNode].gpus):
            return ()
        from ddplaunch.features.reservations.command_line import share_gpus

        own, notes = share_gpus(plan.gpu_addresses)
        if own:
            self._keep_claim(own)
        return notes

    def _keep_claim(self, own: OwnClaim) -> None:
        self._held.append(own)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        return _ClaimHolder(self._held) if self._held else None


class _ClaimHolder(NodeSide):
    """Removes the claims of this launcher once its job has ended; if it is killed, the kernel unlocks them."""

    def __init__(self, held: list[OwnClaim]) -> None:
        self._held = held

    def finish(self) -> None:
        for own in self._held:
            own.release()


FEATURE = ReserveDevices()
