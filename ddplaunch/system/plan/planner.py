"""The planner: ``make_plan`` is a pure function of the options, the environment and the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count
from ddplaunch.base.types import JsonObject
from ddplaunch.system.plan import rank_layout, rendezvous
from ddplaunch.system.plan.hardware import explain_shared_mig
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.plan import DEFAULT_ROLE, Fact, Plan
from ddplaunch.system.plan.rank_layout import Cpus, DeviceSlot, Node
from ddplaunch.system.plan.rendezvous import SOURCE_ASSUMED, SOURCE_MISSING, SourcedValue
from ddplaunch.system.target.target import Target, TargetKind


class PlanSpec(Struct, frozen=True):
    """The input of the planner from the options; None if not given. ``--nnodes 2:4`` is ``min_nodes`` 2, ``nnodes`` 4.

    A field with the name of an option has the value of the option, except fields about nodes.

    ``started_rank`` is set if this process is one of the ranks that another launcher started; each is a node here.
    ``sources`` names the cluster system that supplied a field; all others come from the command line.
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
    started_rank: rank_layout.ExternalRank | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    has_node_rank: bool = True  # False with --node-rank auto: nodes get their rank when they join
    role: str = DEFAULT_ROLE
    pass_local_rank: bool = False
    virtual_local_rank: bool = False
    domain: str | None = None
    programs: tuple[JsonObject, ...] = ()  # beside the ranks, for those who read the plan
    nodes_without_ranks: int = 0  # how many nodes without ranks follow the others in a dry run

    def with_cluster_source(self, name: str, sourced: SourcedValue) -> SourcedValue:
        """Return the value of field ``name`` with the cluster system as its source, if one supplied it."""
        return SourcedValue(sourced.value, self.sources.get(name, sourced.source))


class MachineInfo(Struct, frozen=True):
    """This machine: its name, allowed CPUs, cores, NUMA nodes, and the devices that the job may use.

    ``usable_cpus``: fewer than ``allowed_cpus`` if a container has a CPU quota; None is all of them.
    ``is_cpu_bound``: whether this process may use only some of the machine's CPUs.
    ``slots_source``: how the devices were found; ``gpu_addresses``: of all GPUs, by index.
    ``variables`` make exactly these devices visible to ranks, each of ``device_masks`` only one of them.
    """

    host: str
    allowed_cpus: Cpus
    physical_cpus: int
    usable_cpus: int | None = None
    numa: tuple[Cpus, ...] = ()
    slots: tuple[DeviceSlot, ...] = ()
    slots_source: str = ""
    gpu_addresses: Mapping[int, str] = field(default_factory=dict)
    is_cpu_bound: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    device_masks: tuple[Mapping[str, str], ...] = ()
    domain: SourcedValue | None = None  # the name of the group of machines with which it shares fast links


def make_plan(
    spec: PlanSpec,
    target: Target,
    machine: MachineInfo,
    environ: Mapping[str, str],
    run_id: str,
    notes: Iterable[str] = (),
) -> Plan:
    """Plan a job.

    Args:
        environ: the launcher's own variables. OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING are read; with
            several nodes also MASTER_ADDR, MASTER_PORT and NODE_RANK, unless options are given.
        notes: more notes for the user, before the plan's own.

    Raises UsageError if the options contradict each other, or the machine.
    """
    nnodes = spec.nnodes
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes}: a job has at least one node", "leave it out for this machine alone")
    if nnodes > rank_layout.MAX_NODES:
        raise UsageError(f"--nnodes {nnodes}: a job has at most {rank_layout.MAX_NODES:,} nodes")
    node_rank = spec.with_cluster_source("node_rank", _node_rank(spec, environ))
    here = int(node_rank.value)
    counts, counts_source = _rank_counts(spec, machine)
    slots, started_rank = _device_slots(spec, machine)
    backend = rendezvous.choose_backend(spec.backend, spec.init_method, slots[0].backend)
    if backend and target.kind is TargetKind.PROGRAM:
        what = "--backend and --init-method need a Python target, and --no-python runs a program"
        raise UsageError(what, "leave them out")
    all_notes = [*notes, *_device_notes(spec, backend, counts[here], len(machine.slots))]
    all_notes += _mig_notes(backend, machine.slots[: counts[here]], environ)
    rendezvous.check_init_method(spec.init_method)
    given = spec.master_addr, spec.master_port, spec.init_method
    host = machine.host if here == 0 else None
    address, port = rendezvous.locate_store(*given, nnodes=nnodes, here=host, environ=environ)
    address, port = spec.with_cluster_source("master_addr", address), spec.with_cluster_source("master_port", port)
    bound: dict[int, tuple[Cpus, ...]] = {}
    for count in set(counts) if spec.bind == "numa" else ():
        bound[count] = rank_layout.choose_numa_cpus(slots, count, machine.numa, machine.allowed_cpus)
    threads = {count: _threads(count, spec, machine, bound.get(count, ()), environ) for count in set(counts)}
    nodes = _nodes(counts, counts_source, threads, here, machine, address)
    sources = {"--node-rank": node_rank, "--master-addr": address, "--master-port": port}
    return Plan(
        run_id=run_id,
        target=target,
        node_rank=here,
        master_addr=address.value,
        master_port=int(port.value),
        nodes=nodes,
        ranks=rank_layout.assign_ranks(nodes, slots, bound),
        variables=_variables(spec, machine, environ),
        max_restarts=spec.max_restarts,
        backend=backend,
        init_method=spec.init_method,
        facts=(
            *_facts(spec, counts, counts_source, node_rank, machine),
            _to_fact("master address", address),
            _to_fact("master port", port if port.value != "0" else SourcedValue("any free port", "one node")),
            _to_fact("threads per rank", threads[counts[here]]),
        ),
        notes=tuple(all_notes),
        min_nodes=spec.min_nodes if spec.min_nodes != nnodes else None,
        started_rank=started_rank,
        gpus=tuple(dict.fromkeys(slot.name for slot in machine.slots)),
        gpu_addresses=_gpu_addresses(spec, machine, here, counts[here]),
        missing_options=_missing_options(spec, sources, counts_source) if nnodes > 1 else (),
        has_node_rank=spec.has_node_rank or nnodes == 1,
        virtual_local_rank=spec.virtual_local_rank,
        device_masks=machine.device_masks if spec.virtual_local_rank else (),
        local_rank_option=target.local_rank_option if spec.pass_local_rank else None,
        programs=spec.programs,
        nodes_without_ranks=spec.nodes_without_ranks,
        domain=machine.domain.value if machine.domain else "",
    )


def _gpu_addresses(spec: PlanSpec, machine: MachineInfo, here: int, ranks: int) -> tuple[str, ...]:
    """Return the addresses of the GPUs that ranks and other programs of this node use."""
    addresses = [slot.address for slot in machine.slots[:ranks] if slot.address]
    for program in spec.programs:
        if program.get("node", 0) == here and isinstance(indices := program["gpus"], list):
            addresses += [machine.gpu_addresses.get(index, "") for index in indices if isinstance(index, int)]
    return tuple(dict.fromkeys(filter(None, addresses)))


def _device_slots(spec: PlanSpec, machine: MachineInfo) -> tuple[tuple[DeviceSlot, ...], Mapping[str, str | None]]:
    """Return the devices of this node's ranks, and the variables of a rank that another launcher has started."""
    slots = machine.slots or (DeviceSlot("cpu"),)
    started = spec.started_rank
    if started is None:
        return slots, {}
    if spec.virtual_local_rank:
        raise UsageError("--virtual-local-rank: the launcher that started this rank chooses its GPU", "leave it out")
    return (started.slot(slots),), started.variables(slots)


def _variables(spec: PlanSpec, machine: MachineInfo, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **machine.variables,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({} if spec.role == DEFAULT_ROLE else {"ROLE_NAME": spec.role}),
    }


def _facts(
    spec: PlanSpec, counts: tuple[int, ...], counts_source: str, node_rank: SourcedValue, machine: MachineInfo
) -> Iterator[Fact]:
    """Return the facts on ranks, nodes and devices, and on this node's rank and domain."""
    devices, domain = _devices(machine), machine.domain
    if spec.started_rank:
        yield Fact("this rank", f"{node_rank.value} of {spec.nnodes}", counts_source)
        yield _to_fact("devices", devices)
        if domain:
            yield _to_fact("domain", domain)
        return
    if spec.min_nodes not in (None, spec.nnodes):
        yield Fact("nodes", f"{spec.min_nodes} to {spec.nnodes}, planned for {spec.nnodes}", "--nnodes")
    yield Fact("ranks per node", rank_layout.format_counts(counts), counts_source)
    yield _to_fact("devices", devices)
    if spec.nnodes > 1:
        order = Fact("node rank", "as the nodes join", "--node-rank auto")
        yield _to_fact("node rank", node_rank) if spec.has_node_rank else order
        if domain:
            yield _to_fact("domain", domain)


def _missing_options(spec: PlanSpec, sources: Mapping[str, SourcedValue], counts_source: str) -> tuple[str, ...]:
    """Return the options that this node needs to start its ranks in a job of several nodes."""
    missing = [flag for flag, sourced in sources.items() if sourced.source in (SOURCE_ASSUMED, SOURCE_MISSING)]
    if "nproc" not in spec.sources and counts_source not in ("--nproc", "--gpus"):
        missing.append("--nproc as a number")
    return tuple(missing)


def _to_fact(name: str, sourced: SourcedValue) -> Fact:
    return Fact(name, sourced.value, sourced.source)


def _node_rank(spec: PlanSpec, environ: Mapping[str, str]) -> SourcedValue:
    nnodes, variable = spec.nnodes, environ.get("NODE_RANK")
    if spec.node_rank is not None:
        node_rank, source = spec.node_rank, "--node-rank"
    elif nnodes > 1 and variable is not None:
        source = "NODE_RANK"
        number = parse_int(variable)
        if number is None:
            raise UsageError(f"NODE_RANK={variable} is not a number", "unset it, or give --node-rank")
        node_rank = number
    else:
        node_rank, source = 0, SOURCE_ASSUMED
    if not 0 <= node_rank < nnodes:
        valid = "the only node is 0" if nnodes == 1 else f"{nnodes} nodes are numbered 0 to {nnodes - 1}"
        hint = f"--nnodes {node_rank + 1} or more" if node_rank > 0 else "--node-rank 0"
        raise UsageError(f"{source} {node_rank} is out of range: {valid}", f"{hint}, if that was intended")
    return SourcedValue(str(node_rank), source)


def _rank_counts(spec: PlanSpec, machine: MachineInfo) -> tuple[tuple[int, ...], str]:
    """Return the number of ranks of each node, and its source. Raises UsageError if there are too many."""
    gpus = len(machine.slots)
    if spec.nproc is None and spec.gpus is not None:
        counts, source = (gpus or 1,) * spec.nnodes, "--gpus"
    else:
        nproc = "auto" if spec.nproc is None else spec.nproc
        counts, source = rank_layout.parse_nproc(nproc, spec.nnodes, gpus=gpus, physical_cpus=machine.physical_cpus)
    if (world_size := sum(counts)) > rank_layout.MAX_RANKS_TOTAL:
        what = f"--nnodes {spec.nnodes} and --nproc {rank_layout.format_counts(counts)}"
        raise UsageError(f"{what}: a job has at most {rank_layout.MAX_RANKS_TOTAL:,} ranks, not {world_size:,}")
    if not spec.has_node_rank and len(set(counts)) > 1:
        what = f"--nproc {spec.nproc} lists ranks by node rank, which is unknown with --node-rank auto"
        raise UsageError(what, f"give each node its own number: --nproc {counts[0]}")
    return counts, spec.sources.get("nproc", source)


def _device_notes(spec: PlanSpec, backend: str | None, ranks: int, gpus: int) -> list[str]:
    """Compare this node's ranks with its GPUs; return notes. Raises UsageError if the ranks cannot run on them."""
    nccl = rendezvous.uses_nccl(backend)
    if nccl and not gpus:
        what = f"--backend {spec.backend} needs GPUs, and this machine has no visible GPU"
        raise UsageError(what, "--backend gloo")
    if ranks <= gpus or not gpus:
        return []
    gpu_count = format_count(gpus, "GPU")
    if spec.oversubscribe:
        return [f"{ranks} ranks share {gpu_count} (--oversubscribe): LOCAL_RANK exceeds the last device"]
    if spec.gpus is not None:
        what = f"--nproc {spec.nproc} and --gpus {spec.gpus} contradict each other: {ranks} ranks, {gpu_count}"
        raise UsageError(what, f"--nproc {gpus}, or --oversubscribe to share them")
    if nccl:
        what = f"{ranks} ranks on {format_count(gpus, 'visible GPU')}: NCCL allows one rank per GPU"
        raise UsageError(what, f"--nproc {gpus}, or --backend gloo, or --oversubscribe")
    return [f"more ranks than GPUs: {ranks} ranks on {gpu_count}; ranks from {gpus} on have no GPU of their own"]


def _mig_notes(backend: str | None, slots: Sequence[DeviceSlot], environ: Mapping[str, str]) -> list[str]:
    """Note that ranks have MIG instances of one GPU, if NCCL is their backend, or torch's default for them."""
    gpus = [slot.divided_gpu for slot in slots if slot.divided_gpu is not None and slot.backend == "nccl"]
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    if shared is None or (backend and not rendezvous.uses_nccl(backend)) or not (why := explain_shared_mig(environ)):
        return []
    return [f"{gpus.count(shared)} ranks have MIG instances of GPU {shared}: {why}"]


def _threads(
    ranks: int, spec: PlanSpec, machine: MachineInfo, bound: tuple[Cpus, ...], environ: Mapping[str, str]
) -> SourcedValue:
    """Return OMP_NUM_THREADS of a node with ``ranks``; unbound ranks of another launcher share the node's CPUs."""
    started = spec.started_rank
    count = ranks * (started.local_world_size or 1) if started and not machine.is_cpu_bound else ranks
    if environ.get("OMP_NUM_THREADS"):
        return SourcedValue(environ["OMP_NUM_THREADS"], "OMP_NUM_THREADS")
    cpus = machine.usable_cpus or len(machine.allowed_cpus)
    quota = " (the container's quota)" if cpus < len(machine.allowed_cpus) else ""
    threads = min(rank_layout.threads_per_rank(count, len(machine.allowed_cpus), bound), max(1, cpus // count))
    source = f"{format_count(cpus, 'CPU')}{quota} over {format_count(count, 'rank')}"
    return SourcedValue(str(threads), f"{source}, where --bind put them" if bound else source)


def _nodes(
    counts: tuple[int, ...],
    source: str,
    threads: Mapping[int, SourcedValue],
    here: int,
    machine: MachineInfo,
    address: SourcedValue,
) -> tuple[Node, ...]:
    """Return the nodes. Names of other nodes are unknown; for node 0 its address is used."""

    def make_node(index: int, count: int) -> Node:
        if index == here:
            return Node(index, machine.host, count, source, threads[count].value)
        host = address.value if index == 0 and address.source != SOURCE_MISSING else None
        return Node(index, host, count, source if source == "--nproc" else SOURCE_ASSUMED, threads[count].value)

    return tuple(make_node(index, count) for index, count in enumerate(counts))


def _devices(machine: MachineInfo) -> SourcedValue:
    """Describe the devices: "4 × NVIDIA H100 80GB HBM3 (cuda:0 to cuda:3)"."""
    slots = machine.slots
    if not slots:
        return SourcedValue("cpu", machine.slots_source or "no GPU found")
    names = [slot.name for slot in slots]
    counted = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    span = f"{slots[0].device} to {slots[-1].device}" if len(slots) > 1 else slots[0].device
    return SourcedValue(f"{counted} ({span})", machine.slots_source)
