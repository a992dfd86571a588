"""The layout of a job: assigns ranks to nodes, devices and CPUs, from the counts per node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count
from ddplaunch.base.types import Count
from ddplaunch.system.plan.numbers import parse_int

Cpus = tuple[int, ...]  # CPUs by number, ascending
MAX_RANKS_PER_NODE = 4096  # far beyond any machine; a malformed message cannot request a billion
MAX_NODES = 65536  # of a job; beyond any cluster, and still planned in seconds
MAX_RANKS_TOTAL = 262144  # likewise


class DeviceSlot(Struct, frozen=True):
    """A device for one local rank: torch's name ("cuda:0"), the vendor's name, and the CPUs near it."""

    device: str
    name: str = ""
    cpus: Cpus = ()
    backend: str = "gloo"  # torch's default backend for it
    divided_gpu: int | None = None  # the index of the GPU that this MIG instance is a part of
    address: str = ""  # of its GPU


class Node(Struct, frozen=True):
    """One machine of the job; ``source`` is where its number of ranks comes from, "assumed" for another machine.

    ``threads`` is OMP_NUM_THREADS of its ranks.
    """

    node_rank: int
    host: str | None
    local_world_size: int
    source: str
    threads: str = "1"


class Rank(Struct, frozen=True):
    """One process of the job; ``cpus`` is None if it may use all CPUs of its node."""

    rank: int
    local_rank: int
    node_rank: int
    host: str | None
    device: str
    cpus: Cpus | None


class NodeAssignment(Struct, frozen=True):
    """Node rank, first rank and world size that a node gets for one attempt of a multi-node job."""

    node_rank: Count  # differs from --node-rank if an elastic job runs without some nodes
    nnodes: Count
    first_rank: Count  # the global rank of its local rank 0
    world_size: Count
    host_index: Count = 0  # index of its host among the job's hosts, from 0; tasks may share a host
    host_count: Count = 1  # number of hosts of the job
    nodes_on_host: Count = 1  # number of the job's nodes, or tasks, on its host


class ExternalRank(Struct, frozen=True):
    """Place of one rank among those that another launcher, like mpirun, has started; None is unknown.

    ``kept_variables`` are variables of that launcher which stay as they are: torchrun's, which holds the store itself.
    """

    local_rank: int
    local_world_size: int | None
    node_rank: int | None
    nnodes: int | None
    kept_variables: tuple[tuple[str, str], ...] = ()

    def slot(self, slots: Sequence[DeviceSlot]) -> DeviceSlot:
        """Return the device of the rank: the one at its local rank, or the only visible one."""
        return slots[self.local_rank % len(slots)]

    def variables(self, slots: Sequence[DeviceSlot]) -> dict[str, str | None]:
        """Return the environment variables that place the rank; None for variables that must not be set.

        A rank that sees only its own GPU (srun --gpus-per-task=1) has LOCAL_RANK 0: programs choose their device by it.
        """
        masked = len(slots) == 1 and slots[0].device != "cpu"

        def text_or_none(value: int | None) -> str | None:
            return None if value is None else str(value)

        return {
            "LOCAL_RANK": "0" if masked else str(self.local_rank),
            "LOCAL_WORLD_SIZE": text_or_none(self.local_world_size),
            "GROUP_RANK": text_or_none(self.node_rank),
            "GROUP_WORLD_SIZE": text_or_none(self.nnodes),
            "NODE_RANK": text_or_none(self.node_rank),
            **dict(self.kept_variables),
        }


def parse_nproc(text: str, nnodes: int, *, gpus: int, physical_cpus: int) -> tuple[tuple[int, ...], str]:
    """Parse ``--nproc``; return the count of every node and its source, in the words of the plan.

    ``auto`` is the number of visible GPUs, or 1 without GPUs; ``gpu`` counts GPUs, ``cpu`` cores. Other nodes are
    assumed to be like this one. Raises UsageError if it is not a count, or counts a different number of nodes.
    """
    if text == "auto":
        return ((gpus or 1,) * nnodes), f"{format_count(gpus, 'GPU')} found" if gpus else "no GPU found, so one process"
    if text == "gpu":
        if not gpus:
            raise UsageError("--nproc gpu: this machine has no visible GPU", "--nproc cpu, or a number")
        return (gpus,) * nnodes, f"{format_count(gpus, 'GPU')} found"
    if text == "cpu":
        return (physical_cpus,) * nnodes, f"{format_count(physical_cpus, 'physical core')} found"
    counts = tuple(_count(part, text) for part in text.split(","))
    if len(counts) not in (1, nnodes):
        what = f"--nproc {text} has counts for {len(counts)} nodes, but --nnodes is {nnodes}"
        raise UsageError(what, f"--nnodes {len(counts)}, or one count for every node: --nproc {counts[0]}")
    return counts if len(counts) == nnodes else counts * nnodes, "--nproc"


def _count(part: str, text: str) -> int:
    count = parse_int(part)
    if count is None:
        what = f"--nproc {text}: expected a number, a list like 8,8,4, or auto, gpu, cpu"
        raise UsageError(what, "omit it for one rank per GPU")
    if count < 1:
        raise UsageError(f"--nproc {text}: --nproc must be at least 1", "--nproc 1")
    if count > MAX_RANKS_PER_NODE:
        what = f"--nproc {text}: a node runs at most {MAX_RANKS_PER_NODE:,} processes"
        raise UsageError(what, f"--nproc {MAX_RANKS_PER_NODE}")
    return count


def format_counts(counts: tuple[int, ...]) -> str:
    """Format counts of nodes in the form of ``--nproc``."""
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))


def assign_ranks(
    nodes: Sequence[Node], slots: Sequence[DeviceSlot], cpus_by_local_size: Mapping[int, Sequence[Cpus]]
) -> tuple[Rank, ...]:
    """Number the ranks: global rank = sum of the counts of lower nodes + local rank.

    Args:
        slots: what local rank 0, 1, … of a node runs on; used again from the start where a node has more ranks.
        cpus_by_local_size: by a node's number of ranks, the CPUs of each local rank; empty where ranks are not pinned.
    """
    ranks: list[Rank] = []
    for node in nodes:
        for local_rank in range(node.local_world_size):
            device = slots[local_rank % len(slots)].device
            cpus = cpus_by_local_size[node.local_world_size][local_rank] if cpus_by_local_size else None
            ranks.append(Rank(len(ranks), local_rank, node.node_rank, node.host, device, cpus))
    return tuple(ranks)


def choose_numa_cpus(
    slots: Sequence[DeviceSlot], local_world_size: int, numa: Sequence[Cpus], allowed: Collection[int]
) -> tuple[Cpus, ...]:
    """Choose each local rank's CPUs: those near its GPU, or without GPUs a share of the NUMA nodes in turn.

    Only CPUs in ``allowed`` are given; a rank whose node has none of these keeps all of ``allowed``.
    """
    everything = tuple(sorted(allowed))
    usable = [kept for cpus in numa if (kept := _intersection(cpus, everything))] or [everything]
    bound = []
    for local_rank in range(local_world_size):
        near_cpus = slots[local_rank % len(slots)].cpus
        if near_cpus:
            bound.append(_intersection(near_cpus, everything) or everything)
        else:
            bound.append(usable[local_rank * len(usable) // local_world_size])
    return tuple(bound)


def _intersection(some: Collection[int], others: Collection[int]) -> Cpus:
    return tuple(sorted(set(some) & set(others)))


def threads_per_rank(local_world_size: int, allowed: int, bound: Sequence[Cpus] = ()) -> int:
    """Return the default of OMP_NUM_THREADS: a rank's CPUs divided by the ranks that share them, at least 1."""
    if not bound:
        return max(1, allowed // local_world_size)
    return max(1, min(len(cpus) // list(bound).count(cpus) for cpus in bound))
