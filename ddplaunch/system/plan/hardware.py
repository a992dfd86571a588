"""The hardware of one machine, as data: read by ``devices/``, used by the plan.

Holds no reader and no decision; every field is what the driver or the kernel reported, None where neither did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddplaunch.base.types import Count, Pid, Size, TextLine

GPU_BUSY_BYTES = 1 << 30  # with less in use a GPU is free: drivers and desktops take some hundred MiB


class GpuProcess(Struct, frozen=True):
    """A process that holds memory on a GPU; ``name`` and ``user`` are None if the kernel does not disclose them."""

    pid: Pid
    name: TextLine | None
    user: TextLine | None
    memory: Size | None  # bytes

    @property
    def description(self) -> str:
        """The process as shown to users: its name, PID and user, "python 4711 of ann"."""
        return f"{self.name or 'process'} {self.pid}" + (f" of {self.user}" if self.user else "")


class MigInstance(Struct, frozen=True):
    """A slice of an NVIDIA GPU in MIG mode; ``uuid`` is what CUDA_VISIBLE_DEVICES takes ("MIG-...")."""

    uuid: str
    name: str
    memory_total: int | None  # bytes
    gpu_instance: int | None = None  # its memory slice; CUDA shows one compute instance of each
    compute_instance: int | None = None


class Gpu(Struct, frozen=True):
    """One accelerator as its driver numbers it (NVIDIA: NVML's order, which is that of the PCI bus)."""

    vendor: str  # "nvidia", "amd", "intel"
    index: int
    name: str
    uuid: str | None = None
    pci: str | None = None  # "0000:17:00.0", as in /sys/bus/pci/devices
    memory_total: int | None = None  # bytes
    memory_used: int | None = None  # bytes
    numa_node: int | None = None
    cpus: tuple[int, ...] = ()  # the CPUs of its NUMA node; empty if unknown
    mig_mode: bool = False  # whether it is divided into MIG instances: CUDA then has no device for the GPU itself
    mig: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver: str | None = None  # "570.86.15"
    fabric: str | None = None  # the NVLink domain that it shares with GPUs of other machines: "UUID.CLIQUE"

    @property
    def address(self) -> str:
        """An identifier of the GPU on this machine: its PCI address, else its UUID, else vendor and index."""
        return self.pci or self.uuid or f"{self.vendor}-{self.index}"


class LostGpu(Struct, frozen=True):
    """A GPU that its driver lists but cannot access: off its bus, or in need of a reset; ``why`` is its error."""

    index: Count
    why: TextLine

    @property
    def note(self) -> str:
        return f"NVIDIA GPU {self.index} could not be read and is left out: {self.why}."


class NumaNode(Struct, frozen=True):
    """One NUMA node; ``cpus`` are those online, ``memory_total`` is in bytes."""

    index: int
    cpus: tuple[int, ...]
    memory_total: int | None = None


class Cpu(Struct, frozen=True):
    """The processors; ``allowed`` are those in this process's affinity mask, which containers and Slurm also set.

    ``quota`` is how many CPUs' time all processes of its container may use together; None means unlimited.
    """

    name: str | None
    logical: int
    physical: int  # cores behind the allowed CPUs
    allowed: tuple[int, ...]
    numa: tuple[NumaNode, ...]
    memory_total: int | None = None  # bytes
    memory_available: int | None = None  # bytes
    quota: float | None = None

    @property
    def usable_count(self) -> int:
        """The number of CPUs that a job can use, at least 1."""
        return len(self.allowed) if self.quota is None else max(1, min(len(self.allowed), int(self.quota)))


class Hardware(Struct, frozen=True):
    """One machine: its processors and accelerators, with a note on what could not be read.

    ``gpu_evidence``: why it should have GPUs, if its driver lists none. ``lost_gpus``: GPUs that could not be
    read; each has a note.
    """

    cpu: Cpu
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    gpu_evidence: str | None = None
    lost_gpus: tuple[LostGpu, ...] = ()


class GpusFailed(Exception):
    """Raised if a vendor's GPUs exist, by ``evidence``, but its driver does not list them; ``notes`` say why."""

    def __init__(self, evidence: str, notes: Sequence[str | LostGpu]) -> None:
        super().__init__(evidence)
        self.evidence, self.notes = evidence, notes


def explain_shared_mig(environ: Mapping[str, str]) -> str:
    """Return which variables NCCL needs for ranks on MIG instances of one GPU; "" if they are set.

    NCCL tells such instances apart only by the GPU that they are parts of: its user guide, NCCL_MULTI_RANK_GPU_ENABLE.
    """
    if environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        needed = "NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 for that (NCCL 2.30 on, experimental)"
    elif environ.get("NCCL_NVLS_ENABLE") == "1":
        return "NCCL refuses that with NCCL_NVLS_ENABLE=1: unset it"
    else:
        return ""
    nvls = ", and no NCCL_NVLS_ENABLE=1" if environ.get("NCCL_NVLS_ENABLE") == "1" else ""
    return f"{needed}{nvls}; gloo works without"
