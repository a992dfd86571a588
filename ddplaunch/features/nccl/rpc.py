"""The request to keep the evidence about the ranks before the ranks of a stalled attempt are stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ddplaunch.base.types import Count
from ddplaunch.core.rpc_kind import Kind


class StallRequest(Struct, frozen=True):
    """Request to keep the evidence of this attempt."""

    attempt: Count


class StallReply(Struct, frozen=True):
    """The answer that the evidence is kept, as far as it could be collected."""


class StallKind(Kind):
    """The rpc kind of these requests: the reply is empty, as the evidence stays on its node."""

    name, request, reply, timeout_s = "stall", StallRequest, StallReply, 5.0

    def claimed_ranks(self, reply: StallReply) -> Iterable[int]:
        return ()

    def merge(
        self, replies: Mapping[int, StallReply], silent_nodes: tuple[str, ...], world_size: int, now: float
    ) -> StallReply:
        return StallReply()


KIND = StallKind()
