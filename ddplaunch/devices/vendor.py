"""What the readers of all vendors share: a GPU as torch will number it, a vendor, and the masks in its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.plan.hardware import Gpu, LostGpu, MigInstance

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.devices.sysfs import Folder

HIDE_ALL_VALUES = ("", "-1", "NoDevFiles")
"""Values that hide every GPU and are meant to; "NoDevFiles" is Slurm's for a job that asked for none."""

UUID_KINDS = ("gpu-", "mig-")
SOURCE_SEPARATOR = " and "  # between the variables that a source names


@dataclass(frozen=True)
class VisibleGpu:
    """One device as torch will number it: a whole GPU, or one MIG instance of it.

    ``token`` names this device alone in its vendor's variable: a UUID where it has one, else an index.
    """

    gpu: Gpu
    mig: MigInstance | None
    token: str


@dataclass(frozen=True)
class VisibleGpus:
    """The devices that ranks will see, in torch's order.

    ``source`` says who chose them ("--gpus", "CUDA_VISIBLE_DEVICES", "NVML"); ``environ`` is what to set in the ranks
    so that they see just these, empty where what they inherit says so already.
    """

    gpus: tuple[VisibleGpu, ...]
    source: str
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    devices: tuple[str, ...] = ()  # torch's names of ``gpus``, one each: ("cuda:0", "cuda:1"), ("mps",)
    backend: str = "gloo"  # of the process group, without --backend
    by_index: bool = False  # whether a variable is to name them by index: programs read integers there, vLLM for one


@dataclass(frozen=True)
class KernelTrees:
    """Where a reader looks, and for what: the kernel's trees, or those that tests make."""

    sysfs: Folder = "/sys"
    dev: Folder = "/dev"
    processes: bool = False  # whether to list who uses each GPU


ReadResult = tuple[list[Gpu], Sequence[str | LostGpu]]
"""The GPUs in the driver's order, and what people should know: of those that cannot be read, too."""


def _one_each(gpu: Gpu) -> list[VisibleGpu]:
    return [as_whole_gpu(gpu)]


@dataclass(frozen=True)
class Vendor:
    """One maker of GPUs: how they are found, and what its variables say of them. A new one is a file with one of these,
    and its place among ``VENDORS``.
    """

    name: str  # "nvidia", as in JSON
    title: str  # "NVIDIA", for people
    torch: str  # the device type under which torch knows them: "cuda:0", or "mps" where there is only one
    read: Callable[[KernelTrees], ReadResult]
    apply_masks: Callable[
        [Sequence[Gpu], Mapping[str, str]], VisibleGpus
    ]  # what the variables that are set leave of them
    select: Callable[[Sequence[VisibleGpu], list[str], Mapping[str, str]], VisibleGpus]  # says a choice in variables
    backend: str = "gloo"  # torch's for them
    masks: tuple[str, ...] = ()  # the variables that hide some
    hide_all_variables: Mapping[str, str] = field(default_factory=dict)  # variables with which a rank sees none
    has_indices: bool = True  # whether torch numbers them
    devices_of_gpu: Callable[[Gpu], list[VisibleGpu]] = _one_each  # the devices that one GPU is
    indices_hold: Callable[[Sequence[Gpu]], bool] = bool  # whether the vendor's variable counts as we do

    def chosen(
        self, devices: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str], by_index: bool
    ) -> VisibleGpus:
        """Say a choice in variables: by index, or by ``token``, which a MIG instance always is."""
        if by_index and not any(device.mig for device in devices):
            devices = [replace(device, token=str(device.gpu.index)) for device in devices]
        return self.select(devices, notes, environ)

    def with_device_names(self, visible: VisibleGpus) -> VisibleGpus:
        """Add torch's names of the devices, and the backend."""
        devices = tuple(
            f"{self.torch}:{index}" if self.has_indices else self.torch for index in range(len(visible.gpus))
        )
        return replace(visible, devices=devices, backend=self.backend)


def as_whole_gpu(gpu: Gpu) -> VisibleGpu:
    # Level Zero has no UUIDs, and HIP has them only lately.
    return VisibleGpu(gpu, None, str(gpu.index))


def match_uuid(gpus: Iterable[Gpu], prefix: str, whole: Callable[[Gpu], list[VisibleGpu]]) -> list[list[VisibleGpu]]:
    """Return what each UUID that begins so names, "GPU-" or "MIG-" at least; capital letters do not matter.

    ``devices_of_gpu`` says what a GPU is as a whole.
    """
    prefix = prefix.lower()
    matches = []
    for gpu in gpus if prefix.startswith(UUID_KINDS) else ():
        if (gpu.uuid or "").lower().startswith(prefix):
            matches.append(whole(gpu))
        for mig in gpu.mig:
            older = f"MIG-{gpu.uuid}/{mig.gpu_instance}/{mig.compute_instance}"
            if mig.uuid.lower().startswith(prefix) or older.lower() == prefix:
                matches.append([VisibleGpu(gpu, mig, mig.uuid)])
    return matches


def resolve_mask(
    variable: str,
    mask: str,
    available: str,
    find: Callable[[str], list[VisibleGpu]],
    *,
    on_duplicate: Literal["hides all", "ends the list", "counts once"],
) -> tuple[list[VisibleGpu], list[str]]:
    """Resolve the entries of a mask from left to right, up to the first that names no one device.

    Returns them and a note where the mask cannot have meant that; ``format_available`` says in words what could be named.
    """
    visible: list[VisibleGpu] = []
    if mask in HIDE_ALL_VALUES:
        return visible, []
    for entry in mask.rstrip(", ").split(","):
        found = find(entry)
        if not found:
            meant = entry.strip() == "-1"
            return visible, [] if meant else [f"{variable}={mask} ends before {entry!r}: {available}."]
        if any(device in visible for device in found):
            if on_duplicate == "hides all":
                return [], [f"{variable}={mask} names {entry.strip()} twice, so CUDA hides every GPU."]
            if on_duplicate == "ends the list":
                return visible, [f"{variable}={mask} ends before the second {entry.strip()}."]
            continue
        visible += found
    return visible, []


def format_available(gpus: Sequence[Gpu]) -> str:
    return f"this machine has {format_indices([gpu.index for gpu in gpus])}"


def format_indices(indices: Sequence[int]) -> str:
    """Say which indices there are: "4 GPUs, 0 to 3"."""
    count = f"{len(indices)} GPU{'' if len(indices) == 1 else 's'}"
    if len(indices) > 2 and list(indices) == list(range(len(indices))):
        return f"{count}, 0 to {indices[-1]}"
    *others, last = map(str, indices) if indices else ("none",)
    return f"{count}, {', '.join(others)} and {last}" if others else f"{count}, {last}"
