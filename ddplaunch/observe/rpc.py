"""Inspections of the whole job: how node 0 checks and merges what the nodes report of their ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from ddplaunch.core.agent.node_rpc import NodeRpc
from ddplaunch.core.clock_offset import ClockOffset, to_local_time
from ddplaunch.core.messages import RpcReply
from ddplaunch.core.rpc_kind import GetOffset, Kind
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, RankInspection
from ddplaunch.observe.slow_rank_detector import add_slow_ranks

MAX_FULL_STACK_RANKS = 128  # with more ranks, other nodes get the main threads only: the reply must fit in a frame
Replies = Mapping[int, Inspection]


class InspectKind(Kind):
    """The kind of rpc request that inspects all ranks of the job."""

    name, request, reply, timeout_s = "inspect", Detail, Inspection, 3.0

    def claimed_ranks(self, reply: Inspection) -> Iterable[int]:
        return (each.rank for each in reply.ranks)

    def to_local_clock(self, reply: Inspection, offset: ClockOffset, now: float) -> Inspection:
        """Convert the times at which ranks ended and entered collectives from another node's clock to the local clock.

        The moment of the reply is used, not ``offset``, which may not be known yet.
        """

        def convert_moment(moment: float) -> float:
            return moment and min(max(0.0, to_local_time(moment, reply.moment, now)), now)  # 0 is unknown

        def convert_rank(rank: RankInspection) -> RankInspection:
            last = tuple(replace(each, entered=convert_moment(each.entered)) for each in rank.last)
            return replace(rank, ended=rank.ended and convert_moment(rank.ended), last=last)

        programs = tuple(replace(each, since=convert_moment(each.since)) for each in reply.programs)
        return replace(reply, ranks=tuple(map(convert_rank, reply.ranks)), programs=programs)

    def merge(self, replies: Replies, silent_nodes: tuple[str, ...], world_size: int, now: float) -> Inspection:
        ranks = sorted((each for part in replies.values() for each in part.ranks), key=lambda each: each.rank)
        node_only = any(part.node_only for part in replies.values())
        programs = tuple(each for part in replies.values() for each in part.programs)
        return Inspection(now, tuple(ranks), world_size, silent_nodes, node_only, programs=programs)

    def convert_for_requester(self, reply: Inspection, replies: Replies, clock_of: GetOffset, node: int) -> Inspection:
        """Return the inspection with its slow ranks; in a large job, other nodes than node 0 get one stack per rank."""
        if any(rank.arrivals for rank in reply.ranks):
            nodes = {each.rank: number for number, part in replies.items() for each in part.ranks}
            reply = add_slow_ranks(reply, nodes, clock_of)
        if node and len(reply.ranks) > MAX_FULL_STACK_RANKS:
            return replace(reply, ranks=tuple(replace(each, threads=each.threads[:1]) for each in reply.ranks))
        return reply


KIND = InspectKind()


def inspect_job(rpc: NodeRpc, detail: Detail, on_done: Callable[[Inspection], None]) -> None:
    """Inspect all ranks of the job; ``on_done`` gets the inspection, after some seconds at most."""
    rpc.request(KIND.name, detail, KIND.timeout_s, lambda reply: on_done(read_inspection(reply)))


def read_inspection(reply: RpcReply) -> Inspection:
    """Return the inspection in a reply; one without ranks if node 0 has not replied in time."""
    return reply.payload or Inspection(time.time(), (), 0, silent=("node 0",))
