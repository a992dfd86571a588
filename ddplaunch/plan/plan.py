"""The Plan: all that can be known before a process starts, and where each fact comes from.

``make`` is a pure function of what was typed and what the machine said. The dry run prints its result, ``run``
carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.errors import UsageError
from ddplaunch.plan import layout, rendezvous
from ddplaunch.plan.layout import Cpus, Node, Place, Rank, Slot
from ddplaunch.plan.numbers import whole
from ddplaunch.plan.rendezvous import ASSUMED, MISSING, Sourced
from ddplaunch.target.target import Kind, Target
from ddplaunch.words import counted

if TYPE_CHECKING:
    from typing import Any

ROLE = "default"  # what `--role` may name otherwise. It is a name only: ranks are not numbered by roles.


@dataclass(frozen=True)
class JobSpec:
    """What the options say of a job; None where they do not. ``--nnodes 2:4`` is ``min_nodes`` 2 and ``nnodes`` 4.

    ``started_rank`` is set if this process is one rank of those that another launcher started; each is a node here.
    ``sources`` says where the values of some fields come from that look typed: the system whose variables say them.
    """

    nproc: str | None = None
    nnodes: int = 1
    min_nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    init_method: str | None = None
    gpus: str | None = None
    oversubscribe: bool = False
    bind: str | None = None
    max_restarts: int = 0
    started_rank: layout.StartedRank | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    numbered: bool = True  # whether the node rank is this node's; else the nodes get theirs as they join
    role: str = ROLE
    pass_local_rank: bool = False
    virtual_local_rank: bool = False

    def sourced(self, name: str, sourced: Sourced) -> Sourced:
        """Correct the source of a value that looks typed."""
        return Sourced(sourced.value, self.sources.get(name, sourced.source))


@dataclass(frozen=True)
class Machine:
    """What this machine said: its name, the CPUs allowed to us, its cores, its NUMA nodes, and the devices we may use.

    ``usable_cpus`` are fewer than those allowed where a container has only a part of their time; None is all of them.

    ``bound`` is whether somebody has given this process fewer CPUs than the machine has, ``slots_source`` says how the
    devices were found; ``variables`` are what must be set for ranks to see just these, ``masks`` for one to see one.
    """

    host: str
    allowed_cpus: Cpus
    physical_cpus: int
    usable_cpus: int | None = None
    numa: tuple[Cpus, ...] = ()
    slots: tuple[Slot, ...] = ()
    slots_source: str = ""
    bound: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    masks: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Fact:
    """One value of the plan with the place it comes from ("--nproc", "MASTER_ADDR", "assumed", …)."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Plan:
    """One job as it will run.

    ``started_rank`` are variables of a rank that another launcher has started, where they differ; None if not set.
    ``masks`` are, for local rank 0, 1, … of this machine, the variables with which it sees its own device alone.
    """

    run_id: str
    target: Target
    node_rank: int  # this machine's
    master_addr: str
    master_port: int  # of rank 0's store; 0 is chosen when the job starts
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    variables: Mapping[str, str]  # what all ranks get beside the variables of their place (`environment` has them all)
    max_restarts: int
    backend: str | None
    init_method: str | None
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    min_nodes: int | None = None  # the fewest nodes that an elastic job runs with; it is planned for the most
    gpus: tuple[str, ...] = ()  # the models of this machine's devices that ranks use
    started_rank: Mapping[str, str | None] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # the options without which this node cannot start its share on its own
    numbered: bool = True  # whether `node_rank` is known; else it is provisional until this node has joined
    local_rank_option: str | None = None  # what every rank gets as its first argument, with its local rank as the value
    masks: tuple[Mapping[str, str], ...] = ()
    virtual: bool = False  # whether every rank is local rank 0, and its device the first that it sees
    place: Place | None = None  # this machine's, where `nodes` and `ranks` are its own alone; None where they are all

    @property
    def nnodes(self) -> int:
        return self.place.nnodes if self.place else len(self.nodes)

    @property
    def world_size(self) -> int:
        return self.place.world_size if self.place else len(self.ranks)

    @property
    def own_node(self) -> Node:
        """This machine."""
        return self.node_of(self.node_rank)

    def node_of(self, node_rank: int) -> Node:
        """One of ``nodes``, by its node rank."""
        return self.nodes[node_rank - self.nodes[0].node_rank]

    def rank_of(self, number: int) -> Rank:
        """One of ``ranks``, by its global rank."""
        return self.ranks[number - self.ranks[0].rank]

    @property
    def local_ranks(self) -> tuple[Rank, ...]:
        """The ranks of this machine, in order."""
        return tuple(rank for rank in self.ranks if rank.node_rank == self.node_rank)

    @property
    def shown_ranks(self) -> tuple[Rank, ...]:
        """The ranks that people see: all, or only this one if another launcher has started them."""
        return self.local_ranks if self.started_rank else self.ranks

    def where(self, rank: Rank) -> tuple[int | None, int]:
        """Its node rank and local rank as people count, the former None where its launcher does not say."""
        if not self.started_rank:
            return rank.node_rank, rank.local_rank
        node_rank, local_rank = self.started_rank["NODE_RANK"], self.started_rank["LOCAL_RANK"]
        return (int(node_rank) if node_rank else None), int(local_rank or 0)

    @cached_property
    def counts(self) -> str:
        """The ranks of each node, as ``--nproc`` has them."""
        return layout.listed(tuple(node.local_world_size for node in self.nodes))

    @property
    def hosts_store(self) -> bool:
        """Whether rank 0, and with it the job's store, is on this machine, and the store is not torchrun's."""
        return self.node_rank == 0 and self.started_rank.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    @property
    def shared(self) -> dict[str, str]:
        """The variables that are alike on all ranks of this machine."""
        return {"OMP_NUM_THREADS": self.own_node.threads, **self.variables}

    def environment(self, rank: Rank, attempt: int = 0) -> dict[str, str]:
        """Return the variables of one rank in an attempt, of which 0 is the first.

        They are torch's env:// contract, DDPLAUNCH_* for ours, and all that torchrun sets besides. Frameworks find out
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
            "ROLE_NAME": ROLE,
            "ROLE_RANK": str(rank.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "OMP_NUM_THREADS": node.threads,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            # "True" would make every rank, rank 0 included, a client, and a script's own tcp:// store hang.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "DDPLAUNCH_DEVICE": rank.device,
            **self.variables,
        }
        if self.started_rank and rank.node_rank == self.node_rank:
            placed = {**variables, **self.started_rank}
            variables = {name: value for name, value in placed.items() if value is not None}
        if self.virtual:
            first = rank.device.partition(":")[0] + ":0" * (":" in rank.device)
            variables |= {"LOCAL_RANK": "0", "DDPLAUNCH_DEVICE": first}
            if self.masks and rank.node_rank == self.node_rank:
                variables |= self.masks[rank.local_rank % len(self.masks)]
        return variables

    def arguments(self, rank: Rank) -> tuple[str, ...]:
        """What one rank's program is given."""
        if self.local_rank_option is None:
            return self.target.args
        return (f"{self.local_rank_option}={self.environment(rank)['LOCAL_RANK']}", *self.target.args)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the one object that ``--dry-run --json`` prints (docs/dry-run.md has the fields)."""
        nodes = self.started_rank.get("GROUP_WORLD_SIZE", self.nnodes)
        return {
            "run_id": self.run_id,
            "nnodes": nodes and int(nodes),
            "node_rank": self.where(self.local_ranks[0])[0],
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "target": self.target.typed,
            "backend": self.backend,
            "init_method": self.init_method,
            "facts": [{"name": fact.name, "value": fact.value, "source": fact.source} for fact in self.facts],
            "notes": list(self.notes),
            "nodes": [
                {
                    "node_rank": node.node_rank,
                    "host": node.host,
                    "local_world_size": node.local_world_size,
                    "source": node.source,
                }
                for node in (() if self.started_rank else self.nodes)
            ],
            "ranks": [
                {
                    "rank": rank.rank,
                    "local_rank": self.where(rank)[1],
                    "node_rank": self.where(rank)[0],
                    "host": rank.host,
                    "device": rank.device,
                    "cpus": list(rank.cpus) if rank.cpus is not None else None,
                    "env": self.environment(rank),
                    "argv": list(replace(self.target, args=self.arguments(rank)).argv),
                }
                for rank in self.shown_ranks
            ],
        }


def make(
    spec: JobSpec, target: Target, machine: Machine, environ: Mapping[str, str], run_id: str, notes: Iterable[str] = ()
) -> Plan:
    """Plan a job.

    Args:
        environ: the launcher's own variables; MASTER_ADDR, MASTER_PORT and NODE_RANK count where several nodes are
            planned and no flag says otherwise, OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING always.
        notes: what else people should know, said before the plan's own.

    Raises UsageError if the flags contradict each other, or the machine.
    """
    nnodes = spec.nnodes
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes}: a job has at least one node", "leave it out for this machine alone")
    if nnodes > layout.MAX_NODES:
        raise UsageError(f"--nnodes {nnodes}: a job has at most {layout.MAX_NODES:,} nodes")
    node_rank = spec.sourced("node_rank", _node_rank(spec, environ))
    here = int(node_rank.value)
    counts, counts_source = _counts(spec, machine)
    if (world_size := sum(counts)) > layout.MAX_RANKS_IN_ALL:
        asked = f"--nnodes {nnodes} and --nproc {layout.listed(counts)}"
        raise UsageError(f"{asked}: a job has at most {layout.MAX_RANKS_IN_ALL:,} ranks, not {world_size:,}")
    if not spec.numbered and len(set(counts)) > 1:
        what = f"--nproc {spec.nproc} counts by node rank, and --node-rank auto gives none beforehand"
        raise UsageError(what, f"give each node its own: --nproc {counts[0]}")
    counts_source = spec.sources.get("nproc", counts_source)
    slots = machine.slots or (Slot("cpu"),)
    started = spec.started_rank
    if started and spec.virtual_local_rank:
        raise UsageError("--virtual-local-rank: the launcher that started this rank gives it its GPU", "leave it out")
    placed = started.variables(slots) if started else {}
    if started:
        slots = (started.slot(slots),)
    backend = rendezvous.backend(spec.backend, spec.init_method, slots[0].device)
    if backend and target.kind is Kind.PROGRAM:
        what = "--backend and --init-method need a Python target, and --no-python runs a program"
        raise UsageError(what, "leave them out")
    noted = [*notes, *_device_notes(spec, backend, counts[here], len(machine.slots))]
    rendezvous.check_init_method(spec.init_method)
    address, port = rendezvous.locate(
        spec.master_addr,
        spec.master_port,
        spec.init_method,
        nnodes=nnodes,
        here=machine.host if here == 0 else None,
        environ=environ,
    )
    address, port = spec.sourced("master_addr", address), spec.sourced("master_port", port)
    bound: dict[int, tuple[Cpus, ...]] = {}
    if spec.bind == "numa":
        bound = {count: layout.numa_binding(slots, count, machine.numa, machine.allowed_cpus) for count in set(counts)}
    # Ranks that somebody else started, and did not bind, share the machine's CPUs.
    sharing = started.local_world_size or 1 if started and not machine.bound else 1
    threads = {count: _threads(count * sharing, machine, bound.get(count, ()), environ) for count in set(counts)}
    nodes = _nodes(counts, counts_source, threads, here, machine, address)

    facts = [Fact("processes per node", layout.listed(counts), counts_source), _fact("devices", _devices(machine))]
    if started:
        facts[0] = Fact("this rank", f"{here} of {nnodes}", counts_source)
    elif nnodes > 1:
        if spec.min_nodes not in (None, nnodes):
            facts.insert(0, Fact("nodes", f"{spec.min_nodes} to {nnodes}, planned for {nnodes}", "--nnodes"))
        order = Fact("node rank", "as the nodes join", "--node-rank auto")
        facts.append(_fact("node rank", node_rank) if spec.numbered else order)
    facts += [
        _fact("master address", address),
        _fact("master port", port if port.value != "0" else Sourced("any free port", "one node")),
        _fact("threads per rank", threads[counts[here]]),
    ]
    sources = {"--node-rank": node_rank, "--master-addr": address, "--master-port": port}
    missing = [flag for flag, sourced in sources.items() if sourced.source in (ASSUMED, MISSING)]
    if "nproc" not in spec.sources and counts_source not in ("--nproc", "--gpus"):
        missing.append("--nproc as a number")
    return Plan(
        run_id=run_id,
        target=target,
        node_rank=here,
        master_addr=address.value,
        master_port=int(port.value),
        nodes=nodes,
        ranks=layout.number(nodes, slots, bound),
        variables={
            **machine.variables,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **({} if spec.role == ROLE else {"ROLE_NAME": spec.role}),
        },
        max_restarts=spec.max_restarts,
        backend=backend,
        init_method=spec.init_method,
        facts=tuple(facts),
        notes=tuple(noted),
        min_nodes=spec.min_nodes if spec.min_nodes != nnodes else None,
        started_rank=placed,
        gpus=tuple(dict.fromkeys(slot.name for slot in machine.slots)),
        missing=tuple(missing) if nnodes > 1 else (),
        numbered=spec.numbered or nnodes == 1,
        virtual=spec.virtual_local_rank,
        masks=machine.masks if spec.virtual_local_rank else (),
        local_rank_option=target.local_rank_option if spec.pass_local_rank else None,
    )


def _fact(name: str, sourced: Sourced) -> Fact:
    return Fact(name, sourced.value, sourced.source)


def _node_rank(spec: JobSpec, environ: Mapping[str, str]) -> Sourced:
    nnodes, typed = spec.nnodes, environ.get("NODE_RANK")
    if spec.node_rank is not None:
        node_rank, source = spec.node_rank, "--node-rank"
    elif nnodes > 1 and typed is not None:
        source = "NODE_RANK"
        number = whole(typed)
        if number is None:
            raise UsageError(f"NODE_RANK={typed} is not a number", "unset it, or give --node-rank")
        node_rank = number
    else:
        node_rank, source = 0, ASSUMED
    if not 0 <= node_rank < nnodes:
        numbered = "the one node is 0" if nnodes == 1 else f"{nnodes} nodes are numbered 0 to {nnodes - 1}"
        hint = f"--nnodes {node_rank + 1} or more" if node_rank > 0 else "--node-rank 0"
        raise UsageError(f"{source} {node_rank} is out of range: {numbered}", f"{hint}, if that is what was meant")
    return Sourced(str(node_rank), source)


def _counts(spec: JobSpec, machine: Machine) -> tuple[tuple[int, ...], str]:
    gpus = len(machine.slots)
    if spec.nproc is None and spec.gpus is not None:
        return (gpus or 1,) * spec.nnodes, "--gpus"
    text = "auto" if spec.nproc is None else spec.nproc
    return layout.parse_nproc(text, spec.nnodes, gpus=gpus, physical_cpus=machine.physical_cpus)


def _device_notes(spec: JobSpec, backend: str | None, ranks: int, gpus: int) -> list[str]:
    """Compare this node's ranks with its GPUs: what people should know, or why it cannot be."""
    nccl = rendezvous.is_nccl(backend)
    if nccl and not gpus:
        what = f"--backend {spec.backend} needs GPUs, and this machine has no visible GPU"
        raise UsageError(what, "--backend gloo")
    if ranks <= gpus or not gpus:
        return []
    found = counted(gpus, "GPU")
    if spec.oversubscribe:
        return [f"{ranks} ranks share {found} (--oversubscribe): LOCAL_RANK exceeds the last device"]
    if spec.gpus is not None:
        what = f"--nproc {spec.nproc} and --gpus {spec.gpus} contradict each other: {ranks} ranks, {found}"
        raise UsageError(what, f"--nproc {gpus}, or --oversubscribe to share them")
    if nccl:
        what = f"{ranks} ranks on {counted(gpus, 'visible GPU')}: NCCL takes one rank a GPU"
        raise UsageError(what, f"--nproc {gpus}, or --backend gloo, or --oversubscribe")
    return [f"more ranks than GPUs: {ranks} ranks on {found}; ranks from {gpus} on have none of their own"]


def _threads(count: int, machine: Machine, bound: tuple[Cpus, ...], environ: Mapping[str, str]) -> Sourced:
    if environ.get("OMP_NUM_THREADS"):
        return Sourced(environ["OMP_NUM_THREADS"], "OMP_NUM_THREADS")
    cpus = machine.usable_cpus or len(machine.allowed_cpus)
    quota = " (the container's quota)" if cpus < len(machine.allowed_cpus) else ""
    threads = min(layout.threads_per_rank(count, len(machine.allowed_cpus), bound), max(1, cpus // count))
    source = f"{cpus} CPU{'s' * (cpus != 1)}{quota} over {count} rank{'s' * (count != 1)}"
    return Sourced(str(threads), f"{source}, where --bind put them" if bound else source)


def _nodes(
    counts: tuple[int, ...], source: str, threads: Mapping[int, Sourced], here: int, machine: Machine, address: Sourced
) -> tuple[Node, ...]:
    """Other nodes' names are not known; node 0 is called by the address it was given."""

    def node(index: int, count: int) -> Node:
        if index == here:
            return Node(index, machine.host, count, source, threads[count].value)
        host = address.value if index == 0 and address.source != MISSING else None
        return Node(index, host, count, source if source == "--nproc" else ASSUMED, threads[count].value)

    return tuple(node(index, count) for index, count in enumerate(counts))


def _devices(machine: Machine) -> Sourced:
    """Say what there is: "4 × NVIDIA H100 80GB HBM3 (cuda:0 to cuda:3)"."""
    slots = machine.slots
    if not slots:
        return Sourced("cpu", machine.slots_source or "no GPU found")
    names = [slot.name for slot in slots]
    counted = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    span = f"{slots[0].device} to {slots[-1].device}" if len(slots) > 1 else slots[0].device
    return Sourced(f"{counted} ({span})", machine.slots_source)
