"""The Plan: all that can be known before a process starts, and where each fact comes from.

``make`` is a pure function of what was typed and what the machine said. The dry run prints its result, ``run``
carries it out.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddplaunch.errors import UsageError
from ddplaunch.plan import layout
from ddplaunch.plan.environment import worker_environment
from ddplaunch.plan.layout import Node, Rank, Slot
from ddplaunch.plan.target import Kind, Target

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
"""torchrun's port, where several nodes must agree on one and nobody named it."""


@dataclass(frozen=True)
class Request:
    """What was typed; None where a flag was not given."""

    nproc: str | None = None
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    init_method: str | None = None
    gpus: str | None = None
    oversubscribe: bool = False
    bind: str | None = None
    max_restarts: int = 0


@dataclass(frozen=True)
class Machine:
    """What this machine said: its name, the CPUs allowed to us, its cores, its NUMA nodes, and the devices we may use.

    ``slots_source`` says how the devices were found; ``variables`` are what must be set for ranks to see just these.
    """

    host: str
    allowed_cpus: tuple[int, ...]
    physical_cpus: int
    numa: tuple[tuple[int, ...], ...] = ()
    slots: tuple[Slot, ...] = ()
    slots_source: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """One value of the plan with the place it comes from ("--nproc", "MASTER_ADDR", "assumed", …)."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Plan:
    """One job as it will run. ``node_rank`` is this machine's; ``master_port`` 0 is chosen when the job starts."""

    run_id: str
    target: Target
    node_rank: int
    master_addr: str
    master_port: int
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    shared: Mapping[str, str]
    max_restarts: int
    backend: str | None
    init_method: str | None
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]

    @property
    def nnodes(self) -> int:
        return len(self.nodes)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def local_ranks(self) -> tuple[Rank, ...]:
        """The ranks of this machine, in order."""
        return tuple(rank for rank in self.ranks if rank.node_rank == self.node_rank)

    @property
    def hosts_store(self) -> bool:
        """Whether rank 0, and with it the job's store, is on this machine."""
        return self.node_rank == 0

    def environment(self, rank: Rank, attempt: int = 0) -> dict[str, str]:
        """Return the variables of one rank in the given attempt (0 is the first)."""
        return worker_environment(
            rank,
            self.nodes,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            run_id=self.run_id,
            attempt=attempt,
            max_restarts=self.max_restarts,
            shared=self.shared,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as the one object that ``--dry-run --json`` prints (docs/dry-run.md has the fields)."""
        argv = list(self.target.argv)
        return {
            "run_id": self.run_id,
            "nnodes": self.nnodes,
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
                for node in self.nodes
            ],
            "ranks": [
                {
                    "rank": rank.rank,
                    "local_rank": rank.local_rank,
                    "node_rank": rank.node_rank,
                    "host": rank.host,
                    "device": rank.device,
                    "cpus": list(rank.cpus) if rank.cpus is not None else None,
                    "env": self.environment(rank),
                    "argv": argv,
                }
                for rank in self.ranks
            ],
        }


def make(request: Request, target: Target, machine: Machine, environ: Mapping[str, str], run_id: str) -> Plan:
    """Plan a job.

    Args:
        environ: the launcher's own variables; MASTER_ADDR, MASTER_PORT and NODE_RANK count where several nodes are
            planned and no flag says otherwise, OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING always.

    Raises:
        UsageError: the flags contradict each other, or the machine.
    """
    notes: list[str] = []
    facts: list[Fact] = []
    nnodes = request.nnodes
    if nnodes < 1:
        raise UsageError(f"--nnodes {nnodes}: a job has at least one node", "leave it out for this machine alone")
    node_rank = _node_rank(request, environ, facts)
    counts, source = _counts(request, machine)
    local_world_size = counts[node_rank]
    facts.insert(
        0, Fact("processes per node", ",".join(map(str, counts)) if len(set(counts)) > 1 else str(counts[0]), source)
    )
    slots = machine.slots or (Slot("cpu"),)
    _check_devices(request, machine, local_world_size, notes)
    if machine.slots:
        facts.append(Fact("devices", ", ".join(slot.device for slot in slots[:local_world_size]), machine.slots_source))
    address, port = _address(request, environ, facts)
    backend = _backend(request, machine, target)
    _check_init_method(request.init_method, nnodes)

    allowed = machine.allowed_cpus
    bound = None
    if request.bind == "numa":
        bound = layout.numa_binding(slots, max(counts), machine.numa, allowed)
    shared = dict(machine.variables)
    if environ.get("OMP_NUM_THREADS"):
        shared["OMP_NUM_THREADS"] = environ["OMP_NUM_THREADS"]
        facts.append(Fact("threads per rank", shared["OMP_NUM_THREADS"], "OMP_NUM_THREADS"))
    else:
        threads = layout.threads_per_rank(local_world_size, len(allowed), bound[:local_world_size] if bound else None)
        shared["OMP_NUM_THREADS"] = str(threads)
        facts.append(Fact("threads per rank", str(threads), f"{len(allowed)} CPUs over {local_world_size} ranks"))
    shared["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")

    nodes = _nodes(counts, node_rank, source, machine.host, address)
    if nnodes > 1:
        notes.append(f"facts about nodes other than {node_rank} are assumed: only this machine was looked at")
    return Plan(
        run_id=run_id,
        target=target,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        nodes=nodes,
        ranks=layout.number(nodes, slots, bound),
        shared=shared,
        max_restarts=request.max_restarts,
        backend=backend,
        init_method=request.init_method,
        facts=tuple(facts),
        notes=tuple(notes),
    )


def _nodes(counts: tuple[int, ...], node_rank: int, source: str, host: str, address: str) -> tuple[Node, ...]:
    """Other nodes' names are not known; node 0 is called by the address it was given."""

    def node(index: int, count: int) -> Node:
        if index == node_rank:
            return Node(index, host, count, source)
        return Node(index, address if index == 0 else None, count, source if source == "--nproc" else "assumed")

    return tuple(node(index, count) for index, count in enumerate(counts))


def _node_rank(request: Request, environ: Mapping[str, str], facts: list[Fact]) -> int:
    nnodes, node_rank, source = request.nnodes, request.node_rank, "--node-rank"
    if node_rank is None and nnodes > 1 and "NODE_RANK" in environ:
        source = "NODE_RANK"
        try:
            node_rank = int(environ[source])
        except ValueError:
            raise UsageError(f"NODE_RANK={environ[source]} is no number", "unset it, or give --node-rank") from None
    if node_rank is None:
        node_rank, source = 0, "assumed"
    if not 0 <= node_rank < nnodes:
        numbered = "the one node is 0" if nnodes == 1 else f"{nnodes} nodes are numbered 0 to {nnodes - 1}"
        hint = f"--nnodes {node_rank + 1} or more" if node_rank > 0 else "--node-rank 0"
        raise UsageError(f"{source} {node_rank} is out of range: {numbered}", f"{hint}, if that is what was meant")
    if nnodes > 1:
        facts.append(Fact("node rank", str(node_rank), source))
    return node_rank


def _counts(request: Request, machine: Machine) -> tuple[tuple[int, ...], str]:
    text = request.nproc
    if text is None and request.gpus is not None:
        return (len(machine.slots),) * request.nnodes, "--gpus"
    return layout.parse_nproc(
        text or "auto", request.nnodes, gpus=len(machine.slots), physical_cpus=machine.physical_cpus
    )


def _check_devices(request: Request, machine: Machine, local_world_size: int, notes: list[str]) -> None:
    gpus = len(machine.slots)
    if not gpus:
        if request.backend == "nccl":
            raise UsageError("--backend nccl needs GPUs, and this machine has none that is visible", "--backend gloo")
        return
    if local_world_size <= gpus or request.oversubscribe:
        if local_world_size > gpus:
            notes.append(
                f"{local_world_size} ranks share {gpus} GPUs (--oversubscribe): LOCAL_RANK exceeds the last device"
            )
        return
    if request.gpus is not None:
        raise UsageError(
            f"--nproc {local_world_size} and --gpus {request.gpus} contradict each other: {local_world_size} ranks, {gpus} GPUs",
            f"--nproc {gpus}, or --oversubscribe to share them",
        )
    if request.backend in ("nccl", "auto"):
        raise UsageError(
            f"{local_world_size} ranks on {gpus} visible GPUs: NCCL takes one rank a GPU",
            f"--nproc {gpus}, or --backend gloo, or --oversubscribe",
        )
    notes.append(
        f"more ranks than GPUs: {local_world_size} ranks on {gpus} GPUs; ranks from {gpus} on have none of their own"
    )


_PORTS = range(1, 65536)


def _address(request: Request, environ: Mapping[str, str], facts: list[Fact]) -> tuple[str, int]:
    """Where ranks find rank 0's store. One node needs neither; several must agree, so both are said with their source."""
    address, port = request.master_addr, request.master_port
    address_source, port_source = "--master-addr", "--master-port"
    if request.nnodes > 1:
        if address is None and environ.get("MASTER_ADDR"):
            address, address_source = environ["MASTER_ADDR"], "MASTER_ADDR"
        if port is None and environ.get("MASTER_PORT"):
            port_source = "MASTER_PORT"
            try:
                port = int(environ[port_source])
            except ValueError:
                raise UsageError(f"MASTER_PORT={environ[port_source]} is no port", "--master-port 29500") from None
    through = _TCP.fullmatch(request.init_method or "")
    if through:
        method_address, method_port = through["host"].strip("[]"), int(through["port"])
        if port not in (None, method_port) or address not in (None, method_address):
            raise UsageError(
                f"--init-method {request.init_method} and {address or method_address}:{port or method_port} contradict each other",
                "give the address once",
            )
        address, port, address_source, port_source = method_address, method_port, "--init-method", "--init-method"
    if request.nnodes > 1 and port == 0:
        raise UsageError(f"{port_source} 0: several nodes must agree on a port", f"--master-port {DEFAULT_PORT}")
    if port and port not in _PORTS:
        raise UsageError(f"{port_source} {port} is no port: they go from 1 to 65535", f"--master-port {DEFAULT_PORT}")
    if address is not None and not _HOST.fullmatch(address) and not _is_ip(address):
        raise UsageError(f"{address_source} {address} is no host name or address", "--master-addr 10.0.0.1")
    if request.nnodes == 1:
        if address:
            facts.append(Fact("master address", address, address_source))
        if port:
            facts.append(Fact("master port", str(port), port_source))
        return address or LOOPBACK, port or 0
    if address is None:
        address, address_source = "NODE0", "missing"
    if port is None:
        port, port_source = DEFAULT_PORT, "assumed"
    facts += [Fact("master address", address, address_source), Fact("master port", str(port), port_source)]
    return address, port


_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_TCP = re.compile(r"tcp://(?P<host>[^/:\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d+)")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _backend(request: Request, machine: Machine, target: Target) -> str | None:
    if request.backend is None and request.init_method is None:
        return None
    if target.kind is Kind.PROGRAM:
        raise UsageError(
            "--backend and --init-method need a Python target, and --no-python runs a program", "leave them out"
        )
    if request.backend not in (None, "auto"):
        return request.backend
    device = machine.slots[0].device if machine.slots else "cpu"
    return {"cuda": "nccl", "xpu": "xccl"}.get(device.partition(":")[0], "gloo")


def _check_init_method(method: str | None, nnodes: int) -> None:
    if method is None or method == "env://" or _TCP.fullmatch(method):
        return
    if method.startswith("file://"):
        path = method.removeprefix("file://")
        if not path.startswith("/"):
            raise UsageError(f"--init-method {method}: the path must be absolute", "--init-method file:///tmp/store")
        folder = os.path.dirname(path)
        if os.path.isdir(path):
            raise UsageError(
                f"--init-method {method}: {path} is a directory", f"--init-method {method.rstrip('/')}/store"
            )
        if not os.path.isdir(folder):
            raise UsageError(
                f"--init-method {method}: there is no directory {folder}", f"mkdir -p {shlex.quote(folder)}"
            )
        if not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
            raise UsageError(f"--init-method {method}: {path} is not writable", "--init-method file:///tmp/store")
        return
    raise UsageError(f"--init-method {method} is none that is known", "env://, tcp://host:port or file:///path")


def missing_for_run(plan: Plan) -> tuple[str, ...]:
    """Name the flags that must be given before this node's share of a job on several nodes can start on its own."""
    flags = {"node rank": "--node-rank", "master address": "--master-addr", "master port": "--master-port"}
    missing = [flags[fact.name] for fact in plan.facts if fact.name in flags and fact.source in ("assumed", "missing")]
    if any(fact.name == "processes per node" and fact.source not in ("--nproc", "--gpus") for fact in plan.facts):
        missing.append("--nproc")
    return tuple(missing) if plan.nnodes > 1 else ()


def command_for(plan: Plan, node_rank: int, options: Iterable[str]) -> str:
    """Write the command that starts the share of ``node_rank``, with every value that must agree spelled out.

    Args:
        options: the options typed here that say something else (not those about nodes, addresses and counts).
    """
    counts = [node.local_world_size for node in plan.nodes]
    nproc = str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))
    head = ["ddplaunch", "run", "--nnodes", str(plan.nnodes), "--node-rank", str(node_rank)]
    head += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port), "--nproc", nproc, *options]
    if plan.target.kind in (Kind.MODULE, Kind.PROGRAM):
        head.append("-m" if plan.target.kind is Kind.MODULE else "--no-python")
    tail = ["--", *plan.target.args] if any(arg.startswith("-") for arg in plan.target.args) else plan.target.args
    return shlex.join([*head, plan.target.typed, *tail])
