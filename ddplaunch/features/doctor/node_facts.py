"""The facts of one machine, collected by all checks: plain data. Sizes are bytes, None is unknown."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.types import Count, KernelNumber, Name, NonNegativeFloat, TaggedMessage, TextLine
from ddplaunch.system.devices.gpu_health import GpuHealth
from ddplaunch.system.plan.hardware import LostGpu


class TorchInfo(Struct, frozen=True):
    """Facts about torch, after its import."""

    version: TextLine
    cuda: TextLine | None  # the version it was built for
    nccl: TextLine | None
    devices: Count  # GPUs that it can use; 0 if CUDA does not work
    architectures: tuple[TextLine, ...] = ()  # "sm_90", for which its kernels were compiled
    capabilities: tuple[TextLine, ...] = ()  # "sm_90", of each GPU
    why_not: TextLine | None = None  # why CUDA does not work


class JobFolder(Struct, frozen=True):
    """A folder that a job writes to."""

    what: TextLine  # "the current folder": a path may be private, and reports are published
    total: KernelNumber | None = None
    free: KernelNumber | None = None
    error: TextLine | None = None  # why nothing can be written there
    silent: bool = False  # its file system did not answer


class ProcessLimits(Struct, frozen=True):
    """The kernel's limits on this process; None is unlimited."""

    memlock: KernelNumber | None
    open_files: KernelNumber | None
    processes: KernelNumber | None
    processes_left: KernelNumber | None  # of the control group


class RouteToNodeZero(Struct, frozen=True):
    """The route to node 0: local address, interface, and node 0's address."""

    address: Name
    interface: Name | None
    mtu: Count | None = None
    speed: Count | None = None  # Mbit/s, by the driver
    there: Name = ""  # node 0's address, as resolved here

    @property
    def loopback(self) -> bool:
        """Whether the local address is a loopback address, which other nodes cannot reach."""
        return self.address.startswith("127.") or self.address == "::1"


class NetworkAddress(Struct, frozen=True):
    """A network interface of this machine, its address and network."""

    interface: Name
    address: Name
    network: Name  # "10.0.0.0/24"


class NodeFacts(TaggedMessage, frozen=True):
    """Facts of one machine."""

    host: TextLine
    ddplaunch: TextLine
    python: TextLine
    kernel: TextLine
    torch: TorchInfo | None
    torch_error: TextLine | None  # why torch cannot be used
    gpus: tuple[GpuHealth, ...]
    gpus_error: TextLine | None  # why present GPUs cannot be used or queried
    lost_gpus: tuple[LostGpu, ...]
    folders: tuple[JobFolder, ...]
    limits: ProcessLimits
    memory_total: KernelNumber | None  # of the machine, or of the control group, which may have less
    memory_available: KernelNumber | None
    cpus: Count  # on which this process may run
    quota: NonNegativeFloat | None  # CPU time that the control group may use, in CPUs
    load: NonNegativeFloat  # runnable processes, average of the last minute
    infiniband: tuple[TextLine, ...]
    link: RouteToNodeZero | None
    link_error: TextLine | None  # why there is no route to node 0's address
    loopback: TextLine | None  # why this machine cannot connect to itself
    clock_synchronised: bool | None
    networks: tuple[NetworkAddress, ...] = ()
    unknown_interfaces: tuple[TextLine, ...] = ()  # variables that name none of this machine: "GLOO_SOCKET_IFNAME=eth7"
    network_variables: tuple[tuple[TextLine, TextLine], ...] = ()  # of gloo, NCCL and others: name and value
    cannot_start: tuple[TextLine, TextLine] | None = None  # why no rank can be started, and the remedy
    machine: TextLine = ""  # equal for two names of one machine; "" if unknown
