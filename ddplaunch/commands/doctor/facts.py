"""What one machine says of itself, as data; what it means is for ``findings``. Sizes are bytes, None is not known."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ddplaunch.dataclass import dataclass
from ddplaunch.devices.gpu_health import GpuHealth
from ddplaunch.plan.hardware import LostGpu

CACHE = "the cache folder"


@dataclass(frozen=True)
class Folder:
    """A folder that a job writes to."""

    what: str  # "the current folder": its path may tell more than a bug report should
    total: int | None = None
    free: int | None = None
    error: str | None = None  # why nothing can be written there
    silent: bool = False  # its file system did not answer


@dataclass(frozen=True)
class Torch:
    """What torch says of itself, once imported."""

    version: str
    cuda: str | None  # that it was built for
    nccl: str | None
    cuda_works: bool
    devices: Annotated[int, Meta(ge=0, le=1024)]  # GPUs that it can use
    architectures: tuple[str, ...] = ()  # "sm_90", that its kernels were compiled for
    capabilities: tuple[str, ...] = ()  # "sm_90", of each GPU
    why_not: str | None = None  # why CUDA does not work


@dataclass(frozen=True)
class Limits:
    """The kernel's limits on this process; None is unlimited."""

    memlock: int | None
    open_files: int | None
    processes: int | None
    processes_left: int | None  # of the control group's


@dataclass(frozen=True)
class Link:
    """How this machine would reach node 0, or be reached as node 0."""

    address: str
    interface: str | None
    mtu: int | None = None
    speed: int | None = None  # megabits a second, as the driver says
    there: str = ""  # the address that node 0 has from here

    @property
    def loopback(self) -> bool:
        """Whether it leads to this machine itself."""
        return self.address.startswith("127.") or self.address == "::1"


@dataclass(frozen=True)
class Facts:
    """One machine."""

    host: str
    ddplaunch: str
    python: str
    kernel: str
    torch: Torch | None
    torch_error: str | None  # why there is no torch to speak of
    gpus: tuple[GpuHealth, ...]
    gpus_error: str | None  # why GPUs that are there cannot be used, or asked
    lost_gpus: tuple[LostGpu, ...]
    folders: tuple[Folder, ...]
    limits: Limits
    memory_total: int | None  # of the machine, or of the control group, which may have less
    memory_available: int | None
    cpus: int  # that this process may run on
    quota: float | None  # the CPUs whose time the control group may use
    load: float  # processes that want a CPU, over the last minute
    infiniband: tuple[str, ...]
    link: Link | None
    link_error: str | None  # why node 0's address leads nowhere
    loopback: str | None  # why this machine cannot connect to itself
    clock_synchronised: bool | None
    named_loopback: str | None  # the loopback address that the machine's own name leads to
