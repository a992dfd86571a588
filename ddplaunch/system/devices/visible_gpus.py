"""Selects the GPUs that a job may use, in torch's order: by ``--gpus``, else the vendor's mask variables, else all.

Pure: the hardware and the environment come in as data. How many ranks share a GPU is decided elsewhere.

A torch build supports the GPUs of one vendor. On a machine with several, the first of ``VENDORS`` is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.system.devices import VENDORS
from ddplaunch.system.devices.nvidia import NVIDIA, drop_hidden_mig
from ddplaunch.system.devices.vendor import (
    HIDE_ALL_VALUES,
    SOURCE_SEPARATOR,
    UUID_KINDS,
    Vendor,
    VisibleGpu,
    VisibleGpus,
    format_available,
    match_uuid,
)
from ddplaunch.system.plan.hardware import Gpu, Hardware
from ddplaunch.system.plan.numbers import parse_int

NO_GPUS = "none"  # value of --gpus: run on the CPUs
ALL_MIG = "mig"  # in --gpus: all MIG instances
LIST_HINT = "`ddplaunch devices` lists them"


def visible_gpus(hardware: Hardware, wanted: str | None, environ: Mapping[str, str]) -> VisibleGpus:
    """Return the devices that a job may use; ``wanted`` is the value of ``--gpus``, None without it.

    ``--gpus none`` hides them from torch's builds for NVIDIA and AMD; Intel's have no variable for that.
    Raises UsageError if ``wanted`` has a GPU that does not exist, has one twice, or is empty.
    """
    vendor = next((each for each in VENDORS if any(gpu.vendor == each.name for gpu in hardware.gpus)), None)
    if wanted == NO_GPUS:
        variables = (vendor and vendor.hide_all_variables) or NVIDIA.hide_all_variables
        return VisibleGpus((), f"--gpus {NO_GPUS}", dict(variables))
    if vendor is None:
        inherited = _no_gpus_found(environ)
        if wanted is None:
            return inherited
        what = f"--gpus {wanted}: no GPU was found on this machine"
        number = f"; for {wanted} ranks: --nproc {wanted}" if _may_be_number(wanted) else ""
        raise UsageError(what, next(iter(hardware.notes), LIST_HINT + number))
    gpus = [gpu for gpu in hardware.gpus if gpu.vendor == vendor.name]
    inherited = vendor.apply_masks(gpus, environ)
    text = wanted or ",".join(environ.get(name, "") for name in vendor.masks)
    has_uuid = any(entry.strip().lower().startswith(UUID_KINDS) for entry in text.split(","))
    by_index = vendor.indices_hold(gpus) and not has_uuid
    if wanted is None:
        return replace(vendor.with_device_names(inherited), by_index=by_index)
    chosen, notes = _select_requested(vendor, gpus, wanted)
    if _may_be_number(wanted):
        notes.append(f"--gpus {wanted} is GPU {wanted} alone; for {wanted} ranks: --nproc {wanted}")
    masks = [f"{name}={environ[name]}" for name in inherited.source.split(SOURCE_SEPARATOR) if name in environ]
    if masks and any(device not in inherited.gpus for device in chosen):
        notes.append(f"--gpus {wanted} overrides {SOURCE_SEPARATOR.join(masks)}, which lacks some of them.")
    return replace(vendor.with_device_names(vendor.select_visible(chosen, notes, environ, by_index)), by_index=by_index)


def single_device_environments(visible: VisibleGpus, environ: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    """Return for each device the variables with which a rank sees it alone."""
    by_name = {vendor.name: vendor for vendor in VENDORS}
    chosen = ((by_name[each.gpu.vendor], each) for each in visible.gpus)
    return tuple(vendor.select_visible([each], [], environ, visible.by_index).environ for vendor, each in chosen)


def are_all_hidden(environ: Mapping[str, str]) -> bool:
    """Whether a mask variable hides all GPUs on purpose."""
    names = {name for vendor in VENDORS if vendor.hide_all_variables for name in vendor.masks}
    return any(environ.get(name) in HIDE_ALL_VALUES for name in names)


def _may_be_number(wanted: str) -> bool:
    """Whether a single index may be meant as a number of GPUs."""
    return re.fullmatch("[2-9]", wanted) is not None


def _no_gpus_found(environ: Mapping[str, str]) -> VisibleGpus:
    names = [name for vendor in VENDORS for name in vendor.masks]
    masks = [f"{name}={environ[name]}" for name in names if environ.get(name, "") not in HIDE_ALL_VALUES]
    *others, last = masks or ("",)
    set_ones = f"{', '.join(others)}{SOURCE_SEPARATOR}{last} are" if others else f"{last} is"
    return VisibleGpus((), "no GPU found", notes=(f"{set_ones} set, but no GPU was found.",) if masks else ())


def _select_requested(vendor: Vendor, gpus: Sequence[Gpu], wanted: str) -> tuple[list[VisibleGpu], list[str]]:
    chosen: list[VisibleGpu] = []
    for entry in _expand_ranges(wanted):
        found = _find_requested_entry(vendor, gpus, wanted, entry)
        if any(device in chosen for device in found):
            raise UsageError(f"--gpus {wanted}: {entry} is named twice", "name each GPU once")
        chosen += found
    return drop_hidden_mig(chosen)


def _expand_ranges(wanted: str) -> Iterator[str]:
    """Yield the entries of a list like "0-3,6"."""
    for entry in map(str.strip, wanted.split(",")):
        ends = re.fullmatch(r"(\d{1,4})-(\d{1,4})", entry)
        if ends is None:
            yield entry
        elif int(ends[1]) > int(ends[2]):
            raise UsageError(f"--gpus {wanted}: {ends[1]} is more than {ends[2]}", f"--gpus {ends[2]}-{ends[1]}")
        else:
            yield from map(str, range(int(ends[1]), int(ends[2]) + 1))


def _find_requested_entry(vendor: Vendor, gpus: Sequence[Gpu], wanted: str, entry: str) -> list[VisibleGpu]:
    if not entry:
        what = f"--gpus {wanted}: an entry is empty" if wanted.strip() else "--gpus names no GPU"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {LIST_HINT}")
    if entry.lower() == ALL_MIG:
        if not (instances := [device for gpu in gpus for device in vendor.devices_of_gpu(gpu) if device.mig]):
            raise UsageError(f"--gpus {wanted}: no GPU of this machine has MIG instances", LIST_HINT)
        return instances
    if (index := parse_int(entry)) is not None and index >= 0:
        found = next((vendor.devices_of_gpu(gpu) for gpu in gpus if gpu.index == index), None)
        if found is None:
            raise UsageError(f"--gpus {wanted}: {format_available(gpus)}", LIST_HINT)
        return found
    matches = match_uuid(gpus, entry, vendor.devices_of_gpu)
    if len(matches) > 1:
        raise UsageError(f"--gpus {wanted}: {entry} matches {len(matches)} UUIDs", "give more of the UUID")
    if not matches:
        what = f"--gpus {wanted}: this machine has no GPU {entry}"
        raise UsageError(what, f"give indices, GPU-… or MIG-…, separated by commas; {LIST_HINT}")
    return matches[0]
