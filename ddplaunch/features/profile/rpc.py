"""The rpc kind of profiles: node 0 checks the profile of each rank, and forwards it at once."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.types import Seconds
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.messages import RpcRequest
from ddplaunch.core.rpc_kind import Kind, Reply
from ddplaunch.features.profile.node import NodeProfiler
from ddplaunch.features.profile.rank_profile import MAX_PROFILE_S, TORCH_START_S, RankProfile

REPLY_MARGIN_S = 9.0  # beyond the duration of the profile, for the nodes' replies


MAX_TIMEOUT_S = MAX_PROFILE_S + REPLY_MARGIN_S + TORCH_START_S


class ProfileRequest(Struct, frozen=True):
    """Request to profile the ranks for some seconds; ``torch``: also with torch's own profiler."""

    seconds: Seconds
    torch: bool = False

    @property
    def timeout_s(self) -> float:
        return self.seconds + REPLY_MARGIN_S + (TORCH_START_S if self.torch else 0.0)

    def __post_init__(self) -> None:
        if self.seconds > MAX_PROFILE_S:
            raise ValueError(f"a profile of {self.seconds} s")


class ProfileKind(Kind):
    """The rpc kind of profiles of all ranks; each part of the reply is the profile of one rank."""

    name, request, reply, timeout_s = "profile", ProfileRequest, RankProfile, MAX_TIMEOUT_S
    in_parts, busy_error = True, "this job is being profiled already"

    def claimed_ranks(self, reply: RankProfile) -> Iterable[int]:
        return (reply.rank,)

    def to_local_clock(self, reply: RankProfile, offset: ClockOffset, now: float) -> RankProfile:
        return reply.with_clock_offset(offset.offset_s, offset.error_s)

    def answer(self, loop: EventLoop, ranks: NodeRanks, request: RpcRequest, reply: Reply) -> None:
        NodeProfiler(loop, ranks, request, reply).start()


KIND = ProfileKind()
