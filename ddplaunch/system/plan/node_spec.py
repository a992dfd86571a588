"""Node specs (what each node brings to a multi-node job), the assignments made from them, and the resulting plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.types import Count, Name
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import MAX_RANKS_PER_NODE, Node, NodeAssignment, Rank

SOURCE_JOINED = "joined"  # the source of a count that comes from the node itself


class NodeSpec(Struct, frozen=True):
    """What a node brings to the job: the node rank given on it, its host name, and the device of each local rank.

    ``threads`` is OMP_NUM_THREADS of its ranks. ``kind`` is its name in messages: a task if another launcher has
    started one process per rank, several of which may share a machine.
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
        """The name of the node in messages: "node 1 (n1)"."""
        return f"{self.kind} {self.node_rank} ({self.host})"


def make_node_spec(plan: Plan) -> NodeSpec:
    """Return the spec of this node, from its plan."""
    node = plan.local_node
    devices = tuple(rank.device for rank in plan.local_ranks)
    return NodeSpec(plan.node_rank, node.host or "?", devices, node.threads, "task" if plan.started_rank else "node")


def assign_nodes(specs: Sequence[NodeSpec]) -> Iterator[NodeAssignment]:
    """Assign ranks to the nodes of an attempt, in their order."""
    world_size = sum(len(spec.devices) for spec in specs)
    nodes_by_host = Counter(spec.host for spec in specs)
    host_indexes = {host: index for index, host in enumerate(nodes_by_host)}
    first = 0
    for index, spec in enumerate(specs):
        on_host = host_indexes[spec.host], len(host_indexes), nodes_by_host[spec.host]
        yield NodeAssignment(index, len(specs), first, world_size, *on_host)
        first += len(spec.devices)


def with_assignment(
    plan: Plan, assignment: NodeAssignment, run_id: str, address: str, variables: Mapping[str, str]
) -> Plan:
    """Return ``plan``, made when this node knew only itself, with its assignment among all nodes.

    Args:
        address: node 0's, as seen from this node.
        variables: more variables of this node's ranks; not those that the user has set.
    """
    spec, node_rank = make_node_spec(plan), assignment.node_rank
    ranks = [
        Rank(assignment.first_rank + local_rank, local_rank, node_rank, spec.host, rank.device, rank.cpus)
        for local_rank, rank in enumerate(plan.local_ranks)
    ]
    return replace(
        plan,
        run_id=run_id,
        node_rank=node_rank,
        master_addr=address,
        nodes=(_node(spec, node_rank),),
        ranks=tuple(ranks),
        variables={**plan.variables, **variables},
        started_rank=_complete_external_rank(plan.started_rank, assignment),
        assignment=assignment,
    )


def with_all_nodes(plan: Plan, specs: Sequence[NodeSpec]) -> Plan:
    """Return node 0's plan ``with_assignment`` extended by the other nodes; ``specs`` are those of all nodes."""
    nodes, ranks = list(plan.nodes), list(plan.ranks)
    for index, spec in enumerate(specs[1:], 1):
        nodes.append(_node(spec, index))
        for local_rank, device in enumerate(spec.devices):
            ranks.append(Rank(len(ranks), local_rank, index, spec.host, device, None))
    return replace(plan, nodes=tuple(nodes), ranks=tuple(ranks), assignment=None)


def _node(spec: NodeSpec, node_rank: int) -> Node:
    return Node(node_rank, spec.host, len(spec.devices), SOURCE_JOINED, spec.threads)


def _complete_external_rank(started: Mapping[str, str | None], assignment: NodeAssignment) -> Mapping[str, str | None]:
    """Fill in node variables that another launcher does not set; they follow from the rank's host if counts agree."""
    if started.get("GROUP_RANK", "") is not None:
        return started
    counted = {"LOCAL_WORLD_SIZE": str(assignment.nodes_on_host), "GROUP_WORLD_SIZE": str(assignment.host_count)}
    if any(started[name] not in (None, value) for name, value in counted.items()):
        return started
    return {**started, **counted, "GROUP_RANK": str(assignment.host_index), "NODE_RANK": str(assignment.host_index)}
