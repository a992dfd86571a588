"""Which GPUs a job may use and in which order torch will number them: ``--gpus``, else the vendor's variable, else all.

Pure: the hardware and the environment come in as data. Says nothing of how many ranks share them.

A torch build drives the GPUs of one vendor. On a machine with several, that of ``VENDORS`` that comes first is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field
from ddplaunch.errors import UsageError
from ddplaunch.plan.hardware import TORCH_DEVICE_TYPE, Gpu, Hardware, MigInstance
from ddplaunch.plan.numbers import whole

if TYPE_CHECKING:
    from typing import Literal

    from ddplaunch.plan.hardware import Vendor

VENDORS: tuple[Vendor, ...] = ("nvidia", "amd", "intel", "apple")

CUDA = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ZE_MASK = "ZE_AFFINITY_MASK"
ZE_PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
ZE_HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
SYCL = "ONEAPI_DEVICE_SELECTOR"

HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values that hide every GPU and are meant to; "NoDevFiles" is Slurm's for a job that asked for none."""

NONE = "none"  # what `--gpus` calls running on the CPUs on purpose
INDEX = r"\s*\+?([0-9]{1,9})"

UUID_KINDS = ("gpu-", "mig-")

ALL_MIG_INSTANCES = 570
"""The NVIDIA driver since which a process sees several MIG instances (MIG User Guide, "CUDA Device Enumeration")."""

NAMES_THEM = "`ddplaunch devices` lists them"
AND = " and "


@dataclass(frozen=True)
class VisibleGpu:
    """One device as torch will number it: a whole GPU, or one MIG instance of it.

    ``token`` names this device alone in its vendor's variable: a UUID where it has one, else an index.
    """

    gpu: Gpu
    mig: MigInstance | None
    token: str


@dataclass(frozen=True)
class Visible:
    """The devices that ranks will see, in torch's order.

    ``source`` says who chose them ("--gpus", "CUDA_VISIBLE_DEVICES", "NVML"); ``environ`` is what to set in the ranks
    so that they see just these, empty where what they inherit says so already.
    """

    gpus: tuple[VisibleGpu, ...]
    source: str
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """torch's names of ``gpus``, one each: ("cuda:0", "cuda:1"), ("mps",)."""
        kinds = (TORCH_DEVICE_TYPE[device.gpu.vendor] for device in self.gpus)
        return tuple(kind if kind == "mps" else f"{kind}:{index}" for index, kind in enumerate(kinds))


def visible_gpus(hardware: Hardware, wanted: str | None, environ: Mapping[str, str]) -> Visible:
    """Return the devices a job may use; ``wanted`` is the text of ``--gpus``, None where it was not given.

    ``--gpus none`` hides them from torch's builds for NVIDIA and AMD; Intel's and Apple's have no variable for that.
    Raises UsageError if ``wanted`` names a GPU that is not there, names one twice, or names none.
    """
    vendor = next((vendor for vendor in VENDORS if any(gpu.vendor == vendor for gpu in hardware.gpus)), None)
    if wanted == NONE:
        return Visible((), f"--gpus {NONE}", {HIP: "-1"} if vendor == "amd" else {CUDA: ""})
    gpus = [gpu for gpu in hardware.gpus if gpu.vendor == vendor]
    inherited = _INHERITED[vendor](gpus, environ) if vendor else _without_gpus(environ)
    if wanted is None:
        return inherited
    if vendor is None:
        raise UsageError(f"--gpus {wanted}: no GPU was found on this machine", next(iter(hardware.notes), NAMES_THEM))
    chosen, notes = _choose(gpus, wanted)
    masks = [f"{name}={environ[name]}" for name in inherited.source.split(AND) if name in environ]
    if masks and any(device not in inherited.gpus for device in chosen):
        notes.append(f"--gpus {wanted} names GPUs outside of {AND.join(masks)}; --gpus wins.")
    return _select(vendor, chosen, notes, environ)


def alone(visible: Visible, environ: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """For each device the variables with which a rank sees it and no other."""
    return tuple(_select(each.gpu.vendor, [each], [], environ).environ for each in visible.gpus)


def _without_gpus(environ: Mapping[str, str]) -> Visible:
    masks = [f"{name}={environ[name]}" for name in (CUDA, ROCR, HIP, ZE_MASK) if environ.get(name, "") not in HIDES_ALL]
    *others, last = masks or ("",)
    set_ones = f"{', '.join(others)}{AND}{last} are" if others else f"{last} is"
    return Visible((), "no GPU found", notes=(f"{set_ones} set, but no GPU was found.",) if masks else ())


# What the environment says, vendor by vendor.


def _cuda(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Read CUDA_VISIBLE_DEVICES as CUDA does (CUDA Programming Guide, "CUDA Environment Variables").

    An invalid entry ends the list. A doubled one hides every GPU, and an index may have letters behind it: neither is
    documented, torch counts so too (``torch.cuda._parse_visible_devices``).
    """
    mask = environ.get(CUDA)
    if mask is None:
        everything = [device for gpu in gpus for device in _whole(gpu)]
        visible, notes = _as_cuda_shows(everything)
        return Visible(tuple(visible), "NVML", notes=(*notes, *_order_notes(gpus, environ)))
    named, notes = _walk(CUDA, mask, _machine(gpus), lambda entry: _cuda_entry(gpus, entry), doubled="hides all")
    visible, dropped = _as_cuda_shows(named)
    if any(re.match(INDEX, entry) for entry in mask.split(",")):
        notes += _order_notes(gpus, environ)
    return Visible(tuple(visible), CUDA, notes=(*notes, *dropped))


def _cuda_entry(gpus: Sequence[Gpu], entry: str) -> list[VisibleGpu]:
    """Resolve an index, a "GPU-" UUID or its beginning, a "MIG-" UUID or the older "MIG-GPU-<uuid>/<gi>/<ci>"."""
    number = re.match(INDEX, entry)
    if number:
        return next((_whole(gpu) for gpu in gpus if gpu.index == int(number[1])), [])
    matches = _by_uuid(gpus, entry.strip())
    return matches[0] if len(matches) == 1 else []


def _rocm(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Read ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES, else CUDA_VISIBLE_DEVICES, which count within the former.

    Source: ROCm, "GPU isolation techniques"; on doubled entries ROCR-Runtime's ``amd_filter_device.h`` (ends the list)
    and clr's ``rocdevice.cpp`` (counts once). HIP itself ignores an empty variable of its own, torch counts none.
    """
    visible = [_one(gpu) for gpu in gpus]
    have = _machine(gpus)
    sources: list[str] = []
    notes: list[str] = []
    if ROCR in environ:
        find = partial(_rocm_entry, visible, strip=True)
        visible, notes = _walk(ROCR, environ[ROCR], have, find, doubled="ends the list")
        have = f"{ROCR}={environ[ROCR]} leaves {_count(range(len(visible)))} to it"
        sources.append(ROCR)
    inner = next((name for name in (HIP, CUDA) if name in environ), None)
    if inner:
        visible, said = _walk(inner, environ[inner], have, partial(_rocm_entry, visible), doubled="counts once")
        sources.append(inner)
        notes += said
    return Visible(tuple(visible), AND.join(sources) or "KFD", notes=tuple(notes))


def _rocm_entry(devices: Sequence[VisibleGpu], entry: str, *, strip: bool = False) -> list[VisibleGpu]:
    """Resolve an index into this list, or the prefix of one UUID of it; ROCr allows blanks around it, HIP does not."""
    entry = entry.strip() if strip else entry
    if (index := whole(entry)) is not None and index >= 0:
        return list(devices[index : index + 1])
    matches = _by_uuid([device.gpu for device in devices], entry)
    return matches[0] if len(matches) == 1 else []


def _level_zero(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Read ZE_AFFINITY_MASK: numbers of devices to keep; it orders nothing, and numbers without a device go by.

    Source: Level Zero specification, "Affinity Mask"; ``parseAffinityMask`` of Intel's compute-runtime.
    """
    notes = []
    if environ.get(ZE_HIERARCHY) == "COMPOSITE" and len({gpu.pci for gpu in gpus}) < len(gpus):
        notes.append(f"{ZE_HIERARCHY}=COMPOSITE makes the tiles of a card one device; here each tile counts.")
    if SYCL in environ:
        notes.append(f"{SYCL}={environ[SYCL]} may hide more GPUs from torch; ddplaunch does not read it.")
    mask = environ.get(ZE_MASK)
    if mask is None or mask in ("", "default"):
        return Visible(tuple(map(_one, gpus)), "sysfs", notes=tuple(notes))
    kept = {entry.strip() for entry in mask.split(",")}
    strangers = sorted(kept - {str(gpu.index) for gpu in gpus} - {""})
    if strangers:
        notes.append(f"{ZE_MASK}={mask} names {', '.join(strangers)}, but {_machine(gpus)}.")
    return Visible(tuple(_one(gpu) for gpu in gpus if str(gpu.index) in kept), ZE_MASK, notes=tuple(notes))


def _metal(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    return Visible(tuple(map(_one, gpus)), "Metal")


_INHERITED: dict[Vendor, Callable[[Sequence[Gpu], Mapping[str, str]], Visible]] = {
    "nvidia": _cuda,
    "amd": _rocm,
    "intel": _level_zero,
    "apple": _metal,
}


def _walk(
    variable: str,
    mask: str,
    have: str,
    find: Callable[[str], list[VisibleGpu]],
    *,
    doubled: Literal["hides all", "ends the list", "counts once"],
) -> tuple[list[VisibleGpu], list[str]]:
    """Resolve the entries of a mask from left to right, up to the first that names no one device.

    Returns them and a note where the mask cannot have meant that; ``have`` says in words what could be named.
    """
    visible: list[VisibleGpu] = []
    if mask in HIDES_ALL:
        return visible, []
    for entry in mask.rstrip(", ").split(","):
        found = find(entry)
        if not found:
            meant = entry.strip() == "-1"
            return visible, [] if meant else [f"{variable}={mask} ends before {entry!r}: {have}."]
        if any(device in visible for device in found):
            if doubled == "hides all":
                return [], [f"{variable}={mask} names {entry.strip()} twice, so CUDA hides every GPU."]
            if doubled == "ends the list":
                return visible, [f"{variable}={mask} ends before the second {entry.strip()}."]
            continue
        visible += found
    return visible, []


# What --gpus says.


def _choose(gpus: Sequence[Gpu], wanted: str) -> tuple[list[VisibleGpu], list[str]]:
    chosen: list[VisibleGpu] = []
    for entry in map(str.strip, wanted.split(",")):
        found = _wanted_entry(gpus, wanted, entry)
        if any(device in chosen for device in found):
            raise UsageError(f"--gpus {wanted}: {entry} is named twice", "name each GPU once")
        chosen += found
    return _as_cuda_shows(chosen)


def _wanted_entry(gpus: Sequence[Gpu], wanted: str, entry: str) -> list[VisibleGpu]:
    if not entry:
        what = f"--gpus {wanted}: an entry is empty" if wanted.strip() else "--gpus names no GPU"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {NAMES_THEM}")
    if (index := whole(entry)) is not None and index >= 0:
        found = next((_whole(gpu) for gpu in gpus if gpu.index == index), None)
        if found is None:
            raise UsageError(f"--gpus {wanted}: {_machine(gpus)}", NAMES_THEM)
        return found
    matches = _by_uuid(gpus, entry)
    if len(matches) > 1:
        raise UsageError(f"--gpus {wanted}: {entry} matches {len(matches)} UUIDs", "give more of the UUID")
    if not matches:
        what = f"--gpus {wanted}: this machine has no GPU {entry}"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {NAMES_THEM}")
    return matches[0]


def _select(vendor: Vendor, chosen: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str]) -> Visible:
    """Say the choice in the vendor's variables, so that nothing inherited can bend it."""
    tokens = ",".join(device.token for device in chosen)
    variables: dict[str, str] = {}
    if vendor == "nvidia":
        variables[CUDA] = tokens
        if any(device.token.isdecimal() for device in chosen):
            variables[CUDA_ORDER] = "PCI_BUS_ID"  # NVML's order; a UUID needs none
    elif vendor == "amd":
        indices = [str(device.gpu.index) for device in chosen]
        if ROCR in environ:  # HIP's numbers would count within the inherited ones
            variables[ROCR] = ",".join(indices)
            indices = [str(index) for index in range(len(indices))]
        variables[HIP] = ",".join(indices)
    elif vendor == "intel":
        ordered = sorted(chosen, key=lambda device: device.gpu.index)
        if ordered != list(chosen):
            notes.append(f"{ZE_MASK} cannot reorder GPUs, so torch numbers them in the order of the machine.")
        chosen = ordered
        variables = {ZE_MASK: ",".join(device.token for device in ordered), ZE_PCI_ORDER: "1"}
    return Visible(tuple(chosen), "--gpus", variables, tuple(notes))


# GPUs by name, whole and in part.


def _one(gpu: Gpu) -> VisibleGpu:
    # Level Zero knows no UUIDs, and HIP only of late.
    return VisibleGpu(gpu, None, str(gpu.index))


def _whole(gpu: Gpu) -> list[VisibleGpu]:
    """Return the GPU, or, in MIG mode, every instance of it: CUDA has no device for the whole then."""
    if gpu.vendor != "nvidia":
        return [_one(gpu)]
    if gpu.mig:
        return [VisibleGpu(gpu, mig, mig.uuid) for mig in gpu.mig]
    return [VisibleGpu(gpu, None, gpu.uuid or str(gpu.index))]


def _by_uuid(gpus: Iterable[Gpu], prefix: str) -> list[list[VisibleGpu]]:
    """Return what each UUID that begins so names, "GPU-" or "MIG-" at least; capital letters do not matter."""
    prefix = prefix.lower()
    matches = []
    for gpu in gpus if prefix.startswith(UUID_KINDS) else ():
        if (gpu.uuid or "").lower().startswith(prefix):
            matches.append(_whole(gpu))
        for mig in gpu.mig:
            older = f"MIG-{gpu.uuid}/{mig.gpu_instance}/{mig.compute_instance}"
            if mig.uuid.lower().startswith(prefix) or older.lower() == prefix:
                matches.append([VisibleGpu(gpu, mig, mig.uuid)])
    return matches


def _as_cuda_shows(named: Sequence[VisibleGpu]) -> tuple[list[VisibleGpu], list[str]]:
    """Leave out what one process cannot see beside a MIG instance, and say so.

    From driver 570 on that is a second compute instance of the same GPU instance; before, it is everything but the
    first MIG instance (MIG User Guide, "CUDA Device Enumeration").
    """
    first_mig = next((device for device in named if device.mig), None)
    if first_mig is None:
        return list(named), []
    driver = first_mig.gpu.driver or "of unknown version"
    major = re.match(r"\d+", driver)
    if major is None or int(major[0]) < ALL_MIG_INSTANCES:
        visible = [first_mig]
        rule = f"NVIDIA driver {driver} shows a process one MIG instance and nothing else"
    else:
        slices = [(each.gpu, each.mig.gpu_instance) if each.mig else each for each in named]
        visible = [device for index, device in enumerate(named) if slices[index] not in slices[:index]]
        rule = "CUDA shows one compute instance of each GPU instance"
    if len(visible) == len(named):
        return visible, []
    return visible, [f"{rule}, so {len(visible)} of {len(named)} are used; name others by MIG UUID to choose."]


def _order_notes(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[str]:
    """Warn where numbers may differ: CUDA counts from the fastest GPU unless told not to, NVML by the PCI bus."""
    if len({gpu.name for gpu in gpus}) < 2 or environ.get(CUDA_ORDER) == "PCI_BUS_ID":
        return []
    return [f"The GPUs differ, and CUDA may number them in another order than shown; set {CUDA_ORDER}=PCI_BUS_ID."]


def _machine(gpus: Sequence[Gpu]) -> str:
    return f"this machine has {_count([gpu.index for gpu in gpus])}"


def _count(indices: Sequence[int]) -> str:
    """Say which indices there are: "4 GPUs, 0 to 3"."""
    count = f"{len(indices)} GPU{'' if len(indices) == 1 else 's'}"
    if len(indices) > 2 and list(indices) == list(range(len(indices))):
        return f"{count}, 0 to {indices[-1]}"
    *others, last = map(str, indices) if indices else ("none",)
    return f"{count}, {', '.join(others)} and {last}" if others else f"{count}, {last}"
