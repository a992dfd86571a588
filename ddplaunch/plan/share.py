"""What one node brings to a job of several, and the plan that follows once all shares are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.plan.layout import MAX_RANKS, Node, Rank
from ddplaunch.plan.plan import Plan

if TYPE_CHECKING:
    from typing import Literal

JOINED = "joined"  # the source of a count that comes from the node itself


@dataclass(frozen=True)
class Share:
    """One node's part: the node rank that was typed on it, its host name, and of each local rank the device.

    ``threads`` is OMP_NUM_THREADS of its ranks; ``kind`` is what people call it: a task where a system has started one
    process for each rank, several of which share a machine.
    """

    node_rank: int
    host: str
    devices: tuple[str, ...]
    threads: str = "1"
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
    node = plan.nodes[plan.node_rank]
    devices = tuple(rank.device for rank in plan.local_ranks)
    return Share(plan.node_rank, node.host or "?", devices, node.threads, "task" if plan.started_rank else "node")


def with_shares(
    plan: Plan, shares: Sequence[Share], node_rank: int, run_id: str, address: str, variables: Mapping[str, str]
) -> Plan:
    """Return ``plan`` with what is now known of all nodes.

    Args:
        shares: of all nodes that take part, in order; their indices in this sequence are the node ranks of the attempt,
            which differ from the typed ones where an elastic job runs without some of its nodes.
        node_rank: this node's index.
        address: node 0's, as this node reaches it.
        variables: what this node's ranks get besides, unless the user has set it.
    """
    own_cpus = [rank.cpus for rank in plan.local_ranks]
    nodes: list[Node] = []
    ranks: list[Rank] = []
    for index, share in enumerate(shares):
        nodes.append(Node(index, share.host, len(share.devices), JOINED, share.threads))
        for local_rank, device in enumerate(share.devices):
            cpus = own_cpus[local_rank] if index == node_rank else None
            ranks.append(Rank(len(ranks), local_rank, index, share.host, device, cpus))
    return replace(
        plan,
        run_id=run_id,
        node_rank=node_rank,
        master_addr=address,
        nodes=tuple(nodes),
        ranks=tuple(ranks),
        variables={**plan.variables, **variables},
        started_rank=_completed(plan.started_rank, [share.host for share in shares], node_rank),
    )


def _completed(started: Mapping[str, str | None], hosts: Sequence[str], rank: int) -> Mapping[str, str | None]:
    """Fill in what the launcher of all ranks does not say about this one: its node is its host, if the counts agree."""
    if started.get("GROUP_RANK", "") is not None:
        return started
    names = list(dict.fromkeys(hosts))
    counted = {"LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])), "GROUP_WORLD_SIZE": str(len(names))}
    if any(started[name] not in (None, value) for name, value in counted.items()):
        return started
    index = str(names.index(hosts[rank]))
    return {**started, **counted, "GROUP_RANK": index, "NODE_RANK": index}
