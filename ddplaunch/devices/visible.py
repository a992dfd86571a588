"""Which GPUs a job may use and in which order torch will number them: ``--gpus``, else the vendor's variable, else all.

Pure: the hardware and the environment come in as data. Says nothing of how many ranks share them.

A torch build drives the GPUs of one vendor. On a machine with several, that of ``VENDORS`` that comes first is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.dataclass import replace
from ddplaunch.devices import VENDORS
from ddplaunch.devices.nvidia import NVIDIA, as_cuda_shows
from ddplaunch.devices.vendor import AND, HIDES_ALL, UUID_KINDS, Vendor, Visible, VisibleGpu, by_uuid, have
from ddplaunch.errors import UsageError
from ddplaunch.plan.hardware import Gpu, Hardware
from ddplaunch.plan.numbers import whole

NONE = "none"  # what `--gpus` calls running on the CPUs on purpose
NAMES_THEM = "`ddplaunch devices` lists them"


def visible_gpus(hardware: Hardware, wanted: str | None, environ: Mapping[str, str]) -> Visible:
    """Return the devices a job may use; ``wanted`` is the text of ``--gpus``, None where it was not given.

    ``--gpus none`` hides them from torch's builds for NVIDIA and AMD; Intel's and Apple's have no variable for that.
    Raises UsageError if ``wanted`` names a GPU that is not there, names one twice, or names none.
    """
    vendor = next((each for each in VENDORS if any(gpu.vendor == each.name for gpu in hardware.gpus)), None)
    if wanted == NONE:
        return Visible((), f"--gpus {NONE}", dict((vendor and vendor.hiding) or NVIDIA.hiding))
    if vendor is None:
        inherited = _without_gpus(environ)
        if wanted is None:
            return inherited
        what = f"--gpus {wanted}: no GPU was found on this machine"
        raise UsageError(what, next(iter(hardware.notes), NAMES_THEM))
    gpus = [gpu for gpu in hardware.gpus if gpu.vendor == vendor.name]
    inherited = vendor.inherited(gpus, environ)
    text = wanted or ",".join(environ.get(name, "") for name in vendor.masks)
    typed_uuid = any(entry.strip().lower().startswith(UUID_KINDS) for entry in text.split(","))
    by_index = vendor.indices_hold(gpus) and not typed_uuid
    if wanted is None:
        return replace(vendor.named(inherited), by_index=by_index)
    chosen, notes = _choose(vendor, gpus, wanted)
    masks = [f"{name}={environ[name]}" for name in inherited.source.split(AND) if name in environ]
    if masks and any(device not in inherited.gpus for device in chosen):
        notes.append(f"--gpus {wanted} names GPUs outside of {AND.join(masks)}; --gpus wins.")
    return replace(vendor.named(vendor.chosen(chosen, notes, environ, by_index)), by_index=by_index)


def alone(visible: Visible, environ: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """For each device the variables with which a rank sees it and no other."""
    by_name = {vendor.name: vendor for vendor in VENDORS}
    by_index = visible.by_index
    return tuple(by_name[each.gpu.vendor].chosen([each], [], environ, by_index).environ for each in visible.gpus)


def hidden(environ: Mapping[str, str]) -> bool:
    """Whether a variable hides all GPUs, and is meant to."""
    names = {name for vendor in VENDORS if vendor.hiding for name in vendor.masks}
    return any(environ.get(name) in HIDES_ALL for name in names)


def _without_gpus(environ: Mapping[str, str]) -> Visible:
    names = [name for vendor in VENDORS for name in vendor.masks]
    masks = [f"{name}={environ[name]}" for name in names if environ.get(name, "") not in HIDES_ALL]
    *others, last = masks or ("",)
    set_ones = f"{', '.join(others)}{AND}{last} are" if others else f"{last} is"
    return Visible((), "no GPU found", notes=(f"{set_ones} set, but no GPU was found.",) if masks else ())


def _choose(vendor: Vendor, gpus: Sequence[Gpu], wanted: str) -> tuple[list[VisibleGpu], list[str]]:
    chosen: list[VisibleGpu] = []
    for entry in map(str.strip, wanted.split(",")):
        found = _wanted_entry(vendor, gpus, wanted, entry)
        if any(device in chosen for device in found):
            raise UsageError(f"--gpus {wanted}: {entry} is named twice", "name each GPU once")
        chosen += found
    return as_cuda_shows(chosen)


def _wanted_entry(vendor: Vendor, gpus: Sequence[Gpu], wanted: str, entry: str) -> list[VisibleGpu]:
    if not entry:
        what = f"--gpus {wanted}: an entry is empty" if wanted.strip() else "--gpus names no GPU"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {NAMES_THEM}")
    if (index := whole(entry)) is not None and index >= 0:
        found = next((vendor.whole(gpu) for gpu in gpus if gpu.index == index), None)
        if found is None:
            raise UsageError(f"--gpus {wanted}: {have(gpus)}", NAMES_THEM)
        return found
    matches = by_uuid(gpus, entry, vendor.whole)
    if len(matches) > 1:
        raise UsageError(f"--gpus {wanted}: {entry} matches {len(matches)} UUIDs", "give more of the UUID")
    if not matches:
        what = f"--gpus {wanted}: this machine has no GPU {entry}"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {NAMES_THEM}")
    return matches[0]
