"""The request to keep the ranks' flight recorder dumps before the ranks of a stalled attempt are stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ddplaunch.base.types import Count
from ddplaunch.core.rpc_kind import Kind


class StallRequest(Struct, frozen=True):
    """Request to keep the evidence of this attempt."""

    attempt: Count


class StallReply(Struct, frozen=True):
    """The ranks whose dumps were kept."""

    ranks: tuple[Count, ...] = ()


class StallKind(Kind):
    """The rpc kind of these requests: the reply has the ranks whose dumps were kept; the dumps stay on their nodes."""

    name, request, reply, timeout_s = "stall", StallRequest, StallReply, 5.0

    def claimed_ranks(self, reply: StallReply) -> Iterable[int]:
        return reply.ranks

    def merge(
        self, replies: Mapping[int, StallReply], silent_nodes: tuple[str, ...], world_size: int, now: float
    ) -> StallReply:
        return StallReply(tuple(sorted(rank for each in replies.values() for rank in each.ranks)))


KIND = StallKind()
