"""What one node brings to a job of several, its place there once all shares are known, and the plan that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.plan.layout import MAX_RANKS, Node, Place, Rank
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.wire.bounds import Count, Name

JOINED = "joined"  # the source of a count that comes from the node itself


@dataclass(frozen=True)
class Share:
    """One node's part: the node rank that was typed on it, its host name, and of each local rank the device.

    ``threads`` is OMP_NUM_THREADS of its ranks; ``kind`` is what people call it: a task where a system has started one
    process for each rank, several of which share a machine.
    """

    node_rank: Count
    host: Name
    devices: tuple[Name, ...]
    threads: Name = "1"
    kind: Literal["node", "task"] = "node"

    def __post_init__(self) -> None:
        if self.node_rank < 0 or not 1 <= len(self.devices) <= MAX_RANKS:
            raise ValueError(f"node rank {self.node_rank} with {len(self.devices)} ranks")

    @property
    def name(self) -> str:
        """What people read: "node 1 (n1)"."""
        return f"{self.kind} {self.node_rank} ({self.host})"


def own_share(plan: Plan) -> Share:
    """What this node brings, as ``plan`` has it."""
    node = plan.own_node
    devices = tuple(rank.device for rank in plan.local_ranks)
    return Share(plan.node_rank, node.host or "?", devices, node.threads, "task" if plan.started_rank else "node")


def places(shares: Sequence[Share]) -> Iterator[Place]:
    """Where each of the nodes stands that take part in an attempt; their order is that of their ranks."""
    world_size = sum(len(share.devices) for share in shares)
    sharing: dict[str, int] = {}
    for share in shares:
        sharing[share.host] = sharing.get(share.host, 0) + 1
    machines = {host: number for number, host in enumerate(sharing)}
    first = 0
    for index, share in enumerate(shares):
        on = share.host
        yield Place(index, len(shares), first, world_size, machines[on], len(machines), sharing[on])
        first += len(share.devices)


def with_place(plan: Plan, place: Place, run_id: str, address: str, variables: Mapping[str, str]) -> Plan:
    """Return ``plan``, as it was made when this node knew only itself, with its place among all nodes.

    Args:
        address: node 0's, as this node reaches it.
        variables: what this node's ranks get besides, unless the user has set it.
    """
    share, node_rank = own_share(plan), place.node_rank
    ranks = [
        Rank(place.first_rank + local_rank, local_rank, node_rank, share.host, rank.device, rank.cpus)
        for local_rank, rank in enumerate(plan.local_ranks)
    ]
    return replace(
        plan,
        run_id=run_id,
        node_rank=node_rank,
        master_addr=address,
        nodes=(_node(share, node_rank),),
        ranks=tuple(ranks),
        variables={**plan.variables, **variables},
        started_rank=_completed(plan.started_rank, place),
        place=place,
    )


def with_others(plan: Plan, shares: Sequence[Share]) -> Plan:
    """Return node 0's plan ``with_place`` with the other nodes, too; ``shares`` are those of all."""
    nodes, ranks = list(plan.nodes), list(plan.ranks)
    for index, share in enumerate(shares[1:], 1):
        nodes.append(_node(share, index))
        for local_rank, device in enumerate(share.devices):
            ranks.append(Rank(len(ranks), local_rank, index, share.host, device, None))
    return replace(plan, nodes=tuple(nodes), ranks=tuple(ranks), place=None)


def _node(share: Share, node_rank: int) -> Node:
    return Node(node_rank, share.host, len(share.devices), JOINED, share.threads)


def _completed(started: Mapping[str, str | None], place: Place) -> Mapping[str, str | None]:
    """Fill in what the launcher of all ranks does not say about this one: its node is its host, if the counts agree."""
    if started.get("GROUP_RANK", "") is not None:
        return started
    counted = {"LOCAL_WORLD_SIZE": str(place.sharing), "GROUP_WORLD_SIZE": str(place.machines)}
    if any(started[name] not in (None, value) for name, value in counted.items()):
        return started
    return {**started, **counted, "GROUP_RANK": str(place.machine), "NODE_RANK": str(place.machine)}
