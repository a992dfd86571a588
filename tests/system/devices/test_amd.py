"""Tests of the AMD reader, with made-up trees of KFD and amdgpu files."""

from __future__ import annotations

import os
from typing import IO

import pytest

from ddplaunch.system.devices import amd
from ddplaunch.system.devices.amd import read_amd
from ddplaunch.system.devices.vendor import KernelTrees
from tests.system.devices.conftest import MakeTree

NODES = "class/kfd/kfd/topology/nodes"
GIB = 1 << 30

CPU_NODE = "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\ndomain 0\nunique_id 0\ngfx_target_version 0\n"


def gpu_node(*, bus: int, minor: int, unique_id: int = 0x4B2C1A9F8D3E6F7A, version: int = 90402) -> str:
    return (
        f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nlocation_id {bus << 8}\ndomain 0\n"
        f"drm_render_minor {minor}\nunique_id {unique_id}\n"
    )


def card(minor: int) -> str:
    return f"class/drm/renderD{minor}/device"


def test_gpus_in_the_order_of_kfd(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            f"{NODES}/0/properties": CPU_NODE,
            f"{NODES}/10/properties": gpu_node(bus=0x26, minor=129, unique_id=0xAB),
            f"{NODES}/2/properties": gpu_node(bus=0xC1, minor=128),
            f"{card(128)}/product_name": "AMD Instinct MI300X\n",
            f"{card(128)}/mem_info_vram_total": f"{192 * GIB}\n",
            f"{card(128)}/mem_info_vram_used": f"{2 * GIB}\n",
            "bus/pci/devices/0000:c1:00.0/numa_node": "1\n",
            "bus/pci/devices/0000:c1:00.0/local_cpulist": "64-127\n",
        }
    )
    gpus, notes = read_amd(KernelTrees(sysfs))
    assert notes == []
    first, second = gpus
    assert (first.vendor, first.index, first.name) == ("amd", 0, "AMD Instinct MI300X")
    assert first.uuid == "GPU-4b2c1a9f8d3e6f7a"
    assert first.pci == "0000:c1:00.0"
    assert (first.memory_total, first.memory_used) == (192 * GIB, 2 * GIB)
    assert (first.numa_node, first.cpus) == (1, tuple(range(64, 128)))
    assert (second.index, second.pci, second.uuid) == (1, "0000:26:00.0", "GPU-00000000000000ab")


def test_missing_properties_of_a_gpu_are_unknown(make_tree: MakeTree) -> None:
    sysfs = make_tree({f"{NODES}/1/properties": gpu_node(bus=3, minor=128, unique_id=0, version=110000)})
    (gpu,), _ = read_amd(KernelTrees(sysfs))
    assert gpu.name == "AMD gfx1100"
    assert (gpu.uuid, gpu.memory_total, gpu.memory_used, gpu.numa_node) == (None, None, None, None)


@pytest.mark.parametrize(
    ("version", "name"), [(90010, "gfx90a"), (90402, "gfx942"), (100300, "gfx1030"), (110501, "gfx1151")]
)
def test_names_of_instruction_sets(make_tree: MakeTree, version: int, name: str) -> None:
    sysfs = make_tree({f"{NODES}/1/properties": gpu_node(bus=3, minor=128, version=version)})
    assert read_amd(KernelTrees(sysfs))[0][0].name == f"AMD {name}"


def test_memory_of_a_partition_comes_from_its_banks(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            f"{NODES}/1/properties": gpu_node(bus=3, minor=130),
            f"{NODES}/1/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {24 * GIB}\nflags 0\n",
            f"{NODES}/1/mem_banks/1/properties": f"heap_type 4\nsize_in_bytes {1 * GIB}\nflags 0\n",
        }
    )
    assert read_amd(KernelTrees(sysfs))[0][0].memory_total == 24 * GIB


def test_a_gpu_of_another_job_does_not_count(make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs = make_tree(
        {
            f"{NODES}/1/properties": gpu_node(bus=3, minor=128),
            f"{NODES}/2/properties": gpu_node(bus=4, minor=129),
        }
    )

    def deny(path: str, **how: str) -> IO[str]:
        if path.endswith("/1/properties"):  # root in a test reads everything, so the kernel's answer is made up
            raise PermissionError(1, "Operation not permitted", path)
        return open(path, **how)

    monkeypatch.setattr(f"{amd.read_text.__module__}.open", deny, raising=False)
    (gpu,), notes = read_amd(KernelTrees(sysfs))
    assert (gpu.index, gpu.pci) == (0, "0000:04:00.0")
    assert notes == []


def test_processes(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            f"{NODES}/1/properties": gpu_node(bus=3, minor=128),
            f"{NODES}/1/gpu_id": "51234\n",
            f"{amd.KFD}/proc/{os.getpid()}/vram_51234": f"{3 * GIB}\n",
            f"{amd.KFD}/proc/4194305/vram_51234": "0\n",
        }
    )
    assert read_amd(KernelTrees(sysfs))[0][0].processes == ()
    (process,) = read_amd(KernelTrees(sysfs, processes=True))[0][0].processes
    assert (process.pid, process.memory) == (os.getpid(), 3 * GIB)
    assert process.name
