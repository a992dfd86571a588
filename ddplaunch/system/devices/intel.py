"""Intel's discrete GPUs, from the files of the kernel drivers i915 and xe.

Integrated graphics do not count as accelerators and are left out. The kernel has no product names, and publishes no
figure for used memory, so both are absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ddplaunch.system.devices.sysfs import list_numbered, read_int, read_pci_locality, read_text
from ddplaunch.system.devices.vendor import (
    KernelTrees,
    ReadResult,
    Vendor,
    VisibleGpu,
    VisibleGpus,
    as_whole_gpu,
    format_available,
)
from ddplaunch.system.plan.hardware import Gpu

ZE_MASK = "ZE_AFFINITY_MASK"
ZE_PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
ZE_HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
SYCL = "ONEAPI_DEVICE_SELECTOR"

VENDOR_ID = "0x8086"


def read_intel(trees: KernelTrees) -> ReadResult:
    """Return the discrete Intel GPUs by PCI address, the order of ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, and no notes.

    A card with several tiles counts as several GPUs, as in Level Zero and so in torch, by default.
    """
    cards = sorted(
        (os.path.basename(os.path.realpath(f"{card}/device")), card)
        for card, number in list_numbered(os.path.join(trees.sysfs, "class/drm"), "card")
        if number.isdecimal() and read_text(f"{card}/device/vendor") == VENDOR_ID  # card0-DP-1 is a plug of card0
    )
    gpus: list[Gpu] = []
    for pci, card in cards:
        tiles = _read_tiles(card, pci)
        model = (read_text(f"{card}/device/device") or "").removeprefix("0x")  # "0bd5", as in pci.ids
        numa_node, cpus = read_pci_locality(trees.sysfs, pci)
        for tile, memory in enumerate(tiles):
            name = f"Intel GPU {model}" if len(tiles) == 1 else f"Intel GPU {model} tile {tile}"
            gpus.append(Gpu("intel", len(gpus), name, pci=pci, memory_total=memory, numa_node=numa_node, cpus=cpus))
    return gpus, []


def _read_tiles(card: str, pci: str) -> list[int | None]:
    """Return the memory of each tile in bytes, None if the driver does not report it; no tile for integrated graphics.

    xe reports it tile by tile, on discrete GPUs only (``drivers/gpu/drm/xe/xe_tile_sysfs.c`` of Linux). Intel's
    out-of-tree i915 reports that of the whole card, Linux's own i915 reports none: there, a device on bus 0 itself
    ("0000:00:02.0") is integrated graphics, as a card is always behind a bridge.
    """
    driver = os.path.basename(os.path.realpath(f"{card}/device/driver"))
    if driver == "xe":
        folders = sorted(list_numbered(f"{card}/device", "tile"))
        return [size for folder, _ in folders if (size := read_int(f"{folder}/physical_vram_size_bytes"))]
    if driver == "i915":
        whole = read_int(f"{card}/lmem_total_bytes")
        tiles = len(list_numbered(f"{card}/gt", "gt")) or 1
        if whole:
            return [whole // tiles] * tiles
        if pci.split(":")[1] != "00":
            return [None] * tiles
    return []


# Intel's environment variables.


def _apply_affinity_mask(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus:
    """Apply ZE_AFFINITY_MASK: indices of devices to keep, in any order; indices without a device are ignored.

    Source: Level Zero specification, "Affinity Mask"; ``parseAffinityMask`` of Intel's compute-runtime.
    """
    notes = []
    if environ.get(ZE_HIERARCHY) == "COMPOSITE" and len({gpu.pci for gpu in gpus}) < len(gpus):
        notes.append(f"{ZE_HIERARCHY}=COMPOSITE makes the tiles of a card one device; here each tile counts.")
    if SYCL in environ:
        notes.append(f"{SYCL}={environ[SYCL]} may hide more GPUs from torch; ddplaunch does not read it.")
    mask = environ.get(ZE_MASK)
    if mask is None or mask in ("", "default"):
        return VisibleGpus(tuple(map(as_whole_gpu, gpus)), "sysfs", notes=tuple(notes))
    wanted = {entry.strip() for entry in mask.split(",")}
    unknown = sorted(wanted - {str(gpu.index) for gpu in gpus} - {""})
    if unknown:
        notes.append(f"{ZE_MASK}={mask} names {', '.join(unknown)}, but {format_available(gpus)}.")
    kept = tuple(as_whole_gpu(gpu) for gpu in gpus if str(gpu.index) in wanted)
    return VisibleGpus(kept, ZE_MASK, notes=tuple(notes))


def _select_gpus(chosen: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str]) -> VisibleGpus:
    ordered = sorted(chosen, key=lambda device: device.gpu.index)
    if ordered != list(chosen):
        notes.append(f"{ZE_MASK} cannot reorder GPUs, so torch numbers them in the order of the machine.")
    variables = {ZE_MASK: ",".join(device.token for device in ordered), ZE_PCI_ORDER: "1"}
    return VisibleGpus(tuple(ordered), "--gpus", variables, tuple(notes))


INTEL = Vendor(
    "intel", "Intel", "xpu", read_intel, _apply_affinity_mask, _select_gpus, backend="xccl", masks=(ZE_MASK,)
)
"""There is no variable that hides all GPUs."""
