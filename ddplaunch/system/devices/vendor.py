"""Common to all GPU vendors: the ``Vendor`` interface, devices as torch numbers them, ``*_VISIBLE_DEVICES`` masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.text import format_count
from ddplaunch.system.devices.sysfs import Folder
from ddplaunch.system.plan.hardware import Gpu, LostGpu, MigInstance

HIDE_ALL_VALUES = ("", "-1", "NoDevFiles")
"""Mask values that hide every GPU on purpose; Slurm sets "NoDevFiles" for a job that requested no GPU."""

UUID_KINDS = ("gpu-", "mig-")
SOURCE_SEPARATOR = " and "  # between the variables that a source names


class VisibleGpu(Struct, frozen=True):
    """One device as torch numbers it: a whole GPU, or one MIG instance.

    ``token`` identifies the device in its vendor's mask variable: a UUID if it has one, else an index.
    """

    gpu: Gpu
    mig: MigInstance | None
    token: str


class VisibleGpus(Struct, frozen=True):
    """The devices that ranks will see, in torch's order.

    ``source``: what selected them ("--gpus", "CUDA_VISIBLE_DEVICES", "NVML"). ``environ``: variables to set in the
    ranks so that they see exactly these; empty if the inherited variables already do that.
    """

    gpus: tuple[VisibleGpu, ...]
    source: str
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    devices: tuple[str, ...] = ()  # torch's names of ``gpus``: ("cuda:0", "cuda:1")
    backend: str = "gloo"  # of the process group, without --backend
    by_index: bool = False  # list indices in the mask variable instead of UUIDs: programs like vLLM parse integers


class KernelTrees(Struct, frozen=True):
    """The /sys and /dev folders from which GPUs are read (tests use others), and whether to list their processes."""

    sysfs: Folder = "/sys"
    dev: Folder = "/dev"
    processes: bool = False  # whether to list the processes on each GPU


ReadResult = tuple[list[Gpu], Sequence[str | LostGpu]]
"""The GPUs in the driver's order, and notes for the user, including GPUs that cannot be read."""


class Vendor(Struct, frozen=True):
    """A GPU vendor: how its GPUs are found, and how its environment variables mask them.

    To add a vendor, write a file with an instance and add that to ``VENDORS``.
    """

    name: str  # "nvidia", as in JSON
    title: str  # "NVIDIA", in messages
    torch: str  # torch's device type: "cuda"
    read: Callable[[KernelTrees], ReadResult]
    # (GPUs, environment): the devices that the mask variables leave visible
    apply_masks: Callable[[Sequence[Gpu], Mapping[str, str]], VisibleGpus]
    # (devices, notes, environment): the same devices with the mask variables that select them
    select: Callable[[Sequence[VisibleGpu], list[str], Mapping[str, str]], VisibleGpus]
    backend: str = "gloo"  # torch's backend for these devices
    masks: tuple[str, ...] = ()  # names of the mask variables
    hide_all_variables: Mapping[str, str] = field(default_factory=dict)  # variables that hide all GPUs from a rank
    devices_of_gpu: Callable[[Gpu], list[VisibleGpu]] = lambda gpu: [as_whole_gpu(gpu)]  # several in MIG mode
    indices_hold: Callable[[Sequence[Gpu]], bool] = bool  # whether indices in the mask variable equal ``Gpu.index``

    def select_visible(
        self, devices: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str], by_index: bool
    ) -> VisibleGpus:
        """Select ``devices`` by mask variables: by index, or by ``token``, which is always used for MIG instances."""
        if by_index and not any(device.mig for device in devices):
            devices = [replace(device, token=str(device.gpu.index)) for device in devices]
        return self.select(devices, notes, environ)

    def with_device_names(self, visible: VisibleGpus) -> VisibleGpus:
        """Return the visible GPUs with torch's name of each device, and with the backend of this vendor."""
        devices = tuple(f"{self.torch}:{index}" for index in range(len(visible.gpus)))
        return replace(visible, devices=devices, backend=self.backend)


def as_whole_gpu(gpu: Gpu) -> VisibleGpu:
    # By index: Level Zero has no UUIDs, and only recent versions of HIP do.
    return VisibleGpu(gpu, None, str(gpu.index))


def match_uuid(
    gpus: Iterable[Gpu], prefix: str, devices_of_gpu: Callable[[Gpu], list[VisibleGpu]]
) -> list[list[VisibleGpu]]:
    """Return the devices of each GPU or MIG instance whose UUID begins with ``prefix``; case is ignored.

    ``prefix`` is at least "GPU-" or "MIG-".
    """
    prefix = prefix.lower()
    matches = []
    for gpu in gpus if prefix.startswith(UUID_KINDS) else ():
        if (gpu.uuid or "").lower().startswith(prefix):
            matches.append(devices_of_gpu(gpu))
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
    """Resolve the entries of a mask from left to right, up to the first that does not identify one device.

    Returns the devices, and notes on likely mistakes; ``available`` describes the possible entries, for a note.
    """
    visible: list[VisibleGpu] = []
    if mask in HIDE_ALL_VALUES:
        return visible, []
    for entry in mask.rstrip(", ").split(","):
        devices = find(entry)
        if not devices:
            is_intended = entry.strip() == "-1"
            return visible, [] if is_intended else [f"{variable}={mask} is ignored from {entry!r} on: {available}."]
        if any(device in visible for device in devices):
            if on_duplicate == "hides all":
                return [], [f"{variable}={mask} names {entry.strip()} twice, so CUDA hides every GPU."]
            if on_duplicate == "ends the list":
                return visible, [f"{variable}={mask} is ignored from the second {entry.strip()} on."]
            continue
        visible += devices
    return visible, []


def format_available(gpus: Sequence[Gpu]) -> str:
    return f"this machine has {format_indices([gpu.index for gpu in gpus])}"


def format_indices(indices: Sequence[int]) -> str:
    """Describe indices: "4 GPUs, 0 to 3"."""
    count = format_count(len(indices), "GPU")
    if len(indices) > 2 and list(indices) == list(range(len(indices))):
        return f"{count}, 0 to {indices[-1]}"
    *others, last = map(str, indices) if indices else ("none",)
    return f"{count}, {', '.join(others)} and {last}" if others else f"{count}, {last}"
