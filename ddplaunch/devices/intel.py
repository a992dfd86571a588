"""Intel's discrete GPUs, from the files of the kernel drivers i915 and xe.

Integrated graphics do not count as accelerators and are left out. The kernel has no product names, and publishes no
figure for used memory, so both are absent.
"""

from __future__ import annotations

import os

from ddplaunch.devices.sysfs import Folder, numbered, read_beside, read_int, read_text
from ddplaunch.plan.hardware import Gpu

INTEL = "0x8086"


def read_intel(sysfs: Folder) -> tuple[list[Gpu], list[str]]:
    """Return the discrete Intel GPUs by PCI address, the order of ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, and no notes.

    A card of several tiles is that many GPUs, as it is for Level Zero, and so for torch, unless told otherwise.
    """
    cards = sorted(
        (os.path.basename(os.path.realpath(f"{card}/device")), card)
        for card, number in numbered(os.path.join(sysfs, "class/drm"), "card")
        if number.isdecimal() and read_text(f"{card}/device/vendor") == INTEL  # card0-DP-1 is a plug of card0
    )
    gpus: list[Gpu] = []
    for pci, card in cards:
        tiles = _read_tiles(card, pci)
        model = (read_text(f"{card}/device/device") or "").removeprefix("0x")  # "0bd5", as in pci.ids
        numa_node, cpus = read_beside(sysfs, pci)
        for tile, memory in enumerate(tiles):
            name = f"Intel GPU {model}" if len(tiles) == 1 else f"Intel GPU {model} tile {tile}"
            gpus.append(Gpu("intel", len(gpus), name, pci=pci, memory_total=memory, numa_node=numa_node, cpus=cpus))
    return gpus, []


def _read_tiles(card: str, pci: str) -> list[int | None]:
    """Return the memory of each tile in bytes, None where the driver does not say; no tile where it is integrated.

    xe gives it tile by tile, on discrete GPUs only (``drivers/gpu/drm/xe/xe_tile_sysfs.c`` of Linux). Intel's
    out-of-tree i915 gives the card's in one file, Linux's own i915 none; there, integrated graphics show by sitting on
    bus 0 itself ("0000:00:02.0") where a card is always behind a bridge.
    """
    driver = os.path.basename(os.path.realpath(f"{card}/device/driver"))
    if driver == "xe":
        folders = sorted(numbered(f"{card}/device", "tile"))
        return [size for folder, _ in folders if (size := read_int(f"{folder}/physical_vram_size_bytes"))]
    if driver == "i915":
        whole = read_int(f"{card}/lmem_total_bytes")
        tiles = len(numbered(f"{card}/gt", "gt")) or 1
        if whole:
            return [whole // tiles] * tiles
        if pci.split(":")[1] != "00":
            return [None] * tiles
    return []
