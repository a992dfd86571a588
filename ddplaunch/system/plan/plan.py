"""The Plan of a job: everything known before a process starts, with the source of each fact.

``planner`` makes it. The dry run prints it, and ``run`` starts the job by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.types import JsonObject, as_dict
from ddplaunch.system.plan import rank_layout
from ddplaunch.system.plan.rank_layout import Node, NodeAssignment, Rank
from ddplaunch.system.target.target import Target

DEFAULT_ROLE = "default"  # without --role; only a name: ranks are not numbered by role


class Fact(Struct, frozen=True):
    """One value of the plan with its source ("--nproc", "MASTER_ADDR", "assumed", …)."""

    name: str
    value: str
    source: str


class Plan(Struct, frozen=True, dict=True):
    """One job as it will run.

    ``started_rank`` has the variables that differ for a rank that another launcher has started; None: not set.
    ``device_masks`` are, for local rank 0, 1, … of this machine, the variables with which it sees its own device alone.
    """

    run_id: str
    target: Target
    node_rank: int  # this machine's
    master_addr: str
    master_port: int  # the port of the store; 0: chosen when the job starts
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    variables: Mapping[str, str]  # of all ranks, in addition to those per rank (`rank_environment` has all)
    max_restarts: int
    backend: str | None
    init_method: str | None
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    min_nodes: int | None = None  # minimum of an elastic job, which is planned for the maximum
    gpus: tuple[str, ...] = ()  # models of the devices that ranks of this machine use
    gpu_addresses: tuple[str, ...] = ()  # of the GPUs that ranks and other programs of this machine use
    started_rank: Mapping[str, str | None] = field(default_factory=dict)
    missing_options: tuple[str, ...] = ()  # options that this node needs to start its ranks
    has_node_rank: bool = True  # whether `node_rank` is final, or provisional until this node has joined
    local_rank_option: str | None = None  # first argument of every rank, with its local rank as the value
    device_masks: tuple[Mapping[str, str], ...] = ()
    agent_store: bool = False  # whether a process of ddplaunch holds the store, so that rank 0 does not open it
    virtual_local_rank: bool = False  # whether every rank has LOCAL_RANK 0 and sees only its own device
    programs: tuple[JsonObject, ...] = ()  # beside the ranks
    nodes_without_ranks: int = 0  # how many nodes without ranks follow ``nodes`` in a dry run
    domain: str = ""  # of this machine; nodes of one domain share fast links
    assignment: NodeAssignment | None = (
        None  # of this machine, if `nodes` and `ranks` are only its own; None if they are all
    )

    @property
    def nnodes(self) -> int:
        return self.assignment.nnodes if self.assignment else len(self.nodes)

    @property
    def world_size(self) -> int:
        return self.assignment.world_size if self.assignment else len(self.ranks)

    @property
    def local_node(self) -> Node:
        """The node of this launcher."""
        return self.node_of(self.node_rank)

    def node_of(self, node_rank: int) -> Node:
        """Return the node with this node rank."""
        return self.nodes[node_rank - self.nodes[0].node_rank]

    def rank_of(self, number: int) -> Rank:
        """Return the rank with this global rank."""
        return self.ranks[number - self.ranks[0].rank]

    @property
    def local_ranks(self) -> tuple[Rank, ...]:
        """The ranks of this machine, in order."""
        return tuple(rank for rank in self.ranks if rank.node_rank == self.node_rank)

    @property
    def shown_ranks(self) -> tuple[Rank, ...]:
        """The ranks that a dry run shows: all of them; only this process's rank if another launcher started them."""
        return self.local_ranks if self.started_rank else self.ranks

    def node_and_local_rank(self, rank: Rank) -> tuple[int | None, int]:
        """Return a rank's node rank and local rank; the former is None if another launcher does not supply it."""
        if not self.started_rank:
            return rank.node_rank, rank.local_rank
        node_rank, local_rank = self.started_rank["NODE_RANK"], self.started_rank["LOCAL_RANK"]
        return (int(node_rank) if node_rank else None), int(local_rank or 0)

    @cached_property
    def nproc_text(self) -> str:
        """The number of ranks of each node, in the form of ``--nproc``."""
        return rank_layout.format_counts(tuple(node.local_world_size for node in self.nodes))

    @property
    def holds_store(self) -> bool:
        """Whether this machine holds the job's store: rank 0 is here, and torchrun does not hold the store."""
        return self.node_rank == 0 and self.started_rank.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    @property
    def store_file(self) -> str | None:
        """The file of ``--init-method file://`` on node 0, else None; torch creates it and does not remove it."""
        method = self.init_method or ""
        return method.removeprefix("file://") if self.holds_store and method.startswith("file://") else None

    def with_store(self, *, torch: bool) -> Plan:
        """Return the plan with ``agent_store`` set; ``torch`` is whether the zygote has imported torch.

        A fork of the zygote holds the store. A single rank opens its own store, except in an
        elastic job, where a store of the attempt before may still have the port.
        """
        return replace(self, agent_store=torch and (self.world_size > 1 or self.min_nodes is not None))

    @property
    def shared_environment(self) -> dict[str, str]:
        """Return the variables that are equal for all ranks of this machine."""
        return {"OMP_NUM_THREADS": self.local_node.threads, **self.variables}

    def rank_environment(self, rank: Rank, attempt: int = 0) -> dict[str, str]:
        """Return the environment variables of one rank in an attempt; the first attempt is 0.

        They are those of torch's env:// contract, our DDPLAUNCH_* and all others of torchrun. Frameworks find out
        where they are by these: torch.distributed.is_torchelastic_launched() looks for TORCHELASTIC_RUN_ID, Lightning
        and accelerate for LOCAL_RANK and GROUP_RANK.
        """
        node = self.node_of(rank.node_rank)
        variables = {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(node.local_world_size),
            "GROUP_RANK": str(rank.node_rank),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "NODE_RANK": str(rank.node_rank),
            "ROLE_NAME": DEFAULT_ROLE,
            "ROLE_RANK": str(rank.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "OMP_NUM_THREADS": node.threads,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            "DDPLAUNCH_DEVICE": rank.device,
            **self.variables,
        }
        if self.started_rank and rank.node_rank == self.node_rank:
            placed = {**variables, **self.started_rank}
            variables = {name: value for name, value in placed.items() if value is not None}
        if self.virtual_local_rank:
            first = rank.device.partition(":")[0] + ":0" * (":" in rank.device)
            variables |= {"LOCAL_RANK": "0", "DDPLAUNCH_DEVICE": first}
            if self.device_masks and rank.node_rank == self.node_rank:
                variables |= self.device_masks[rank.local_rank % len(self.device_masks)]
        return variables

    def arguments(self, rank: Rank) -> tuple[str, ...]:
        """Return the arguments of one rank's program."""
        if self.local_rank_option is None:
            return self.target.args
        return (f"{self.local_rank_option}={self.rank_environment(rank)['LOCAL_RANK']}", *self.target.args)

    def to_json(self) -> JsonObject:
        """Return the plan as the one object that ``--dry-run --json`` prints (docs/json.md has the fields)."""
        nodes = self.started_rank.get("GROUP_WORLD_SIZE", self.nnodes)
        return {
            "run_id": self.run_id,
            "nnodes": nodes and int(nodes),
            "node_rank": self.node_and_local_rank(self.local_ranks[0])[0],
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "target": self.target.text,
            "backend": self.backend,
            "init_method": self.init_method,
            "facts": [as_dict(fact) for fact in self.facts],
            "notes": list(self.notes),
            "programs": list(self.programs),
            "nodes": [
                {name: value for name, value in as_dict(node).items() if name != "threads"}
                for node in (() if self.started_rank else self.nodes)
            ],
            "ranks": [
                {
                    **as_dict(rank),
                    "local_rank": self.node_and_local_rank(rank)[1],
                    "node_rank": self.node_and_local_rank(rank)[0],
                    "env": self.rank_environment(rank),
                    "argv": list(replace(self.target, args=self.arguments(rank)).argv),
                }
                for rank in self.shown_ranks
            ],
        }
