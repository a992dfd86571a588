"""Profiles: ``ddplaunch profile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide, RankSide

if TYPE_CHECKING:
    from ddplaunch.core.agent.node_ranks import NodeRanks
    from ddplaunch.system.plan.rank_layout import Rank


class ProfileSide(NodeSide):
    """The node side: prepares each rank so that it can be profiled."""

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide:
        return RankSide("features/profile/rank/profile_side", {})


class Profile(Feature):
    commands = (Command("profile", "Profile the ranks of a run.", heading="Diagnose"),)
    requests = ("request",)
    rpc_kinds = ("rpc",)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        return ProfileSide() if context.config.inspect else None


FEATURE = Profile()
