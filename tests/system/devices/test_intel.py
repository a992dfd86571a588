"""Tests of the Intel reader, with made-up trees of i915 and xe files."""

from __future__ import annotations

import pytest

from ddplaunch.system.devices.intel import read_intel
from ddplaunch.system.devices.vendor import KernelTrees
from tests.system.devices.conftest import MakeTree

GIB = 1 << 30


def card(number: int, pci: str, driver: str, device: str, vendor: str = "0x8086", **files: str) -> dict[str, str]:
    """One card as the kernel lays it out; "__" in the name of a file of its PCI device is a "/"."""
    home = f"bus/pci/devices/{pci}"
    return {
        f"{home}/vendor": f"{vendor}\n",
        f"{home}/device": f"{device}\n",
        f"{home}/driver": f"-> bus/pci/drivers/{driver}",
        f"class/drm/card{number}/device": f"-> {home}",
        **{f"{home}/{name.replace('__', '/')}": text for name, text in files.items()},
    }


def test_xe_cards_by_pci_address(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            **card(1, "0000:03:00.0", "xe", "0xe20b", tile0__physical_vram_size_bytes=f"{12 * GIB}\n", numa_node="1\n"),
            **card(0, "0000:83:00.0", "xe", "0xe20b", tile0__physical_vram_size_bytes=f"{12 * GIB}\n"),
            "class/drm/card0-DP-1/status": "disconnected\n",
        }
    )
    gpus, notes = read_intel(KernelTrees(sysfs))
    assert notes == []
    assert [(gpu.index, gpu.pci) for gpu in gpus] == [(0, "0000:03:00.0"), (1, "0000:83:00.0")]
    assert (gpus[0].vendor, gpus[0].name, gpus[0].memory_total) == ("intel", "Intel GPU e20b", 12 * GIB)
    assert (gpus[0].numa_node, gpus[1].numa_node) == (1, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        card(0, "0000:00:02.0", "i915", "0x46a6"),  # integrated graphics
        card(1, "0000:01:02.0", "xe", "0x7d55"),  # without memory of its own
        card(0, "0000:03:00.0", "i915", "0x56a0", vendor="0x1002"),
        card(1, "0000:04:00.0", "vfio-pci", "0x56a0"),  # lent to a virtual machine
    ],
)
def test_what_does_not_count(make_tree: MakeTree, files: dict[str, str]) -> None:
    assert read_intel(KernelTrees(make_tree(files))) == ([], [])


def test_i915(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            **card(0, "0000:03:00.0", "i915", "0x56a0"),
            **card(1, "0000:04:00.0", "i915", "0x56c0"),
            "class/drm/card1/lmem_total_bytes": f"{16 * GIB}\n",
        }
    )
    gpus, _ = read_intel(KernelTrees(sysfs))
    assert [gpu.memory_total for gpu in gpus] == [None, 16 * GIB]


def test_every_tile_is_a_gpu(make_tree: MakeTree) -> None:
    tiles = {f"tile{tile}__physical_vram_size_bytes": f"{64 * GIB}\n" for tile in (0, 1)}
    gpus, _ = read_intel(KernelTrees(make_tree(card(0, "0000:29:00.0", "xe", "0x0bd5", **tiles))))
    assert [gpu.name for gpu in gpus] == ["Intel GPU 0bd5 tile 0", "Intel GPU 0bd5 tile 1"]
    assert [(gpu.index, gpu.memory_total) for gpu in gpus] == [(0, 64 * GIB), (1, 64 * GIB)]
