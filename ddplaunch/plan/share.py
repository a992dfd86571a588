"""What one node brings to a job of several, its place there once all shares are known, and the plan that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.plan.layout import MAX_RANKS_PER_NODE, Node, NodeAssignment, Rank
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.wire.bounds import Count, Name

SOURCE_JOINED = "joined"  # the source of a count that comes from the node itself


@dataclass(frozen=True)
class NodeSpec:
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
        if self.node_rank < 0 or not 1 <= len(self.devices) <= MAX_RANKS_PER_NODE:
            raise ValueError(f"node rank {self.node_rank} with {len(self.devices)} ranks")

    @property
    def name(self) -> str:
        """What people read: "node 1 (n1)"."""
        return f"{self.kind} {self.node_rank} ({self.host})"


def make_node_spec(plan: Plan) -> NodeSpec:
    """What this node brings, as ``plan`` has it."""
    node = plan.local_node
    devices = tuple(rank.device for rank in plan.local_ranks)
    return NodeSpec(plan.node_rank, node.host or "?", devices, node.threads, "task" if plan.started_rank else "node")


def assign_nodes(shares: Sequence[NodeSpec]) -> Iterator[NodeAssignment]:
    """Where each of the nodes stands that take part in an attempt; their order is that of their ranks."""
    world_size = sum(len(share.devices) for share in shares)
    sharing: dict[str, int] = {}
    for share in shares:
        sharing[share.host] = sharing.get(share.host, 0) + 1
    machines = {host: number for number, host in enumerate(sharing)}
    first = 0
    for index, share in enumerate(shares):
        on = share.host
        yield NodeAssignment(index, len(shares), first, world_size, machines[on], len(machines), sharing[on])
        first += len(share.devices)


def with_assignment(plan: Plan, place: NodeAssignment, run_id: str, address: str, variables: Mapping[str, str]) -> Plan:
    """Return ``plan``, as it was made when this node knew only itself, with its place among all nodes.

    Args:
        address: node 0's, as this node reaches it.
        variables: what this node's ranks get besides, unless the user has set it.
    """
    share, node_rank = make_node_spec(plan), place.node_rank
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
        started_rank=_complete_external_rank(plan.started_rank, place),
        assignment=place,
    )


def with_all_nodes(plan: Plan, shares: Sequence[NodeSpec]) -> Plan:
    """Return node 0's plan ``with_assignment`` with the other nodes, too; ``shares`` are those of all."""
    nodes, ranks = list(plan.nodes), list(plan.ranks)
    for index, share in enumerate(shares[1:], 1):
        nodes.append(_node(share, index))
        for local_rank, device in enumerate(share.devices):
            ranks.append(Rank(len(ranks), local_rank, index, share.host, device, None))
    return replace(plan, nodes=tuple(nodes), ranks=tuple(ranks), assignment=None)


def _node(share: NodeSpec, node_rank: int) -> Node:
    return Node(node_rank, share.host, len(share.devices), SOURCE_JOINED, share.threads)


def _complete_external_rank(started: Mapping[str, str | None], place: NodeAssignment) -> Mapping[str, str | None]:
    """Fill in what the launcher of all ranks does not say about this one: its node is its host, if the counts agree."""
    if started.get("GROUP_RANK", "") is not None:
        return started
    counted = {"LOCAL_WORLD_SIZE": str(place.nodes_on_host), "GROUP_WORLD_SIZE": str(place.host_count)}
    if any(started[name] not in (None, value) for name, value in counted.items()):
        return started
    return {**started, **counted, "GROUP_RANK": str(place.host_index), "NODE_RANK": str(place.host_index)}
