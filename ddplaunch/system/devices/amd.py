"""AMD's GPUs, from the files of the kernel's compute driver (KFD), which is also where ROCm finds them.

A GPU that this container or job may not use cannot be read there and is skipped, just as by ROCm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from ddplaunch.system.devices.cgroups import read_counters
from ddplaunch.system.devices.process_usage import describe_process
from ddplaunch.system.devices.sysfs import Folder, list_numbered, read_int, read_pci_locality, read_text
from ddplaunch.system.devices.vendor import (
    SOURCE_SEPARATOR,
    KernelTrees,
    ReadResult,
    Vendor,
    VisibleGpu,
    VisibleGpus,
    as_whole_gpu,
    format_available,
    format_indices,
    match_uuid,
    resolve_mask,
)
from ddplaunch.system.plan.hardware import Gpu, GpuProcess
from ddplaunch.system.plan.numbers import parse_int

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"  # which HIP reads too

KFD = "class/kfd/kfd"

LOCAL_HEAPS = (1, 2)  # HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE: a mem_bank of the GPU's own


def read_amd(trees: KernelTrees) -> ReadResult:
    """Return the AMD GPUs in KFD's order, which is that of ROCR_VISIBLE_DEVICES, and no notes.

    ``uuid`` has the form that ROCR_VISIBLE_DEVICES takes, "GPU-" and 16 hexadecimal digits; old GPUs have none.
    """
    gpus: list[Gpu] = []
    sysfs = trees.sysfs
    folders = list_numbered(os.path.join(sysfs, KFD, "topology/nodes"), "")
    for node, _ in sorted(folders, key=lambda folder: int(folder[1])):
        properties = read_counters(f"{node}/properties")
        if not properties.get("simd_count"):
            continue  # a CPU, or a GPU that this process may not use
        pci = _address(properties)
        device = os.path.join(sysfs, f"class/drm/renderD{properties.get('drm_render_minor', 0)}/device")
        numa_node, cpus = read_pci_locality(sysfs, pci)
        unique = properties.get("unique_id")
        gpus.append(
            Gpu(
                vendor="amd",
                index=len(gpus),
                name=read_text(f"{device}/product_name") or f"AMD {_architecture(properties)}",
                uuid=f"GPU-{unique:016x}" if unique else None,
                pci=pci,
                memory_total=read_int(f"{device}/mem_info_vram_total") or _read_bank_memory(node),
                memory_used=read_int(f"{device}/mem_info_vram_used"),
                numa_node=numa_node,
                cpus=cpus,
                processes=_read_processes(sysfs, read_int(f"{node}/gpu_id")) if trees.processes else (),
            )
        )
    return gpus, []


def _address(properties: dict[str, int]) -> str:
    # location_id is the bus in one byte, then five bits of device and three of function, as in PCI itself.
    location = properties.get("location_id", 0)
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _architecture(properties: dict[str, int]) -> str:
    """Return ROCm's name of the instruction set: "gfx90a" for 90010, "gfx1100" for 110000."""
    version = properties.get("gfx_target_version", 0)
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _read_bank_memory(node: str) -> int | None:
    banks = [read_counters(f"{bank}/properties") for bank, _ in list_numbered(f"{node}/mem_banks", "")]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in LOCAL_HEAPS) or None


def _read_processes(sysfs: Folder, gpu_id: int | None) -> tuple[GpuProcess, ...]:
    """List the processes with memory on the GPU: KFD has a folder for each, with the bytes in vram_<gpu_id>."""
    processes = []
    for folder, pid in list_numbered(os.path.join(sysfs, KFD, "proc"), ""):
        memory = read_int(f"{folder}/vram_{gpu_id}")
        if memory:
            processes.append(describe_process(int(pid), memory))
    return tuple(sorted(processes, key=lambda process: process.pid))


# ROCm's environment variables.


def _apply_rocm_masks(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus:
    """Select GPUs by ROCR_VISIBLE_DEVICES, then, among these, by HIP_VISIBLE_DEVICES or else CUDA_VISIBLE_DEVICES.

    Source: ROCm, "GPU isolation techniques"; on duplicates ROCR-Runtime's ``amd_filter_device.h`` (ends the list)
    and clr's ``rocdevice.cpp`` (counts once). HIP itself ignores an empty variable of its own; torch counts no GPUs.
    """
    visible = [as_whole_gpu(gpu) for gpu in gpus]
    available = format_available(gpus)
    sources: list[str] = []
    notes: list[str] = []
    if ROCR in environ:
        find = partial(_resolve_entry, visible, strip=True)
        visible, notes = resolve_mask(ROCR, environ[ROCR], available, find, on_duplicate="ends the list")
        available = f"{ROCR}={environ[ROCR]} leaves {format_indices(range(len(visible)))} to it"
        sources.append(ROCR)
    inner = next((name for name in (HIP, CUDA) if name in environ), None)
    if inner:
        find = partial(_resolve_entry, visible)
        visible, inner_notes = resolve_mask(inner, environ[inner], available, find, on_duplicate="counts once")
        sources.append(inner)
        notes += inner_notes
    return VisibleGpus(tuple(visible), SOURCE_SEPARATOR.join(sources) or "KFD", notes=tuple(notes))


def _resolve_entry(devices: Sequence[VisibleGpu], entry: str, *, strip: bool = False) -> list[VisibleGpu]:
    """Resolve an index into ``devices``, or the prefix of one UUID; ROCr allows blanks around it, HIP does not."""
    entry = entry.strip() if strip else entry
    if (index := parse_int(entry)) is not None and index >= 0:
        return list(devices[index : index + 1])
    matches = match_uuid([device.gpu for device in devices], entry, lambda gpu: [as_whole_gpu(gpu)])
    return matches[0] if len(matches) == 1 else []


def _select(chosen: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str]) -> VisibleGpus:
    indices = [str(device.gpu.index) for device in chosen]
    variables: dict[str, str] = {}
    if ROCR in environ:  # HIP's indices would index into the inherited ones
        variables[ROCR] = ",".join(indices)
        indices = [str(index) for index in range(len(indices))]
    variables[HIP] = ",".join(indices)
    return VisibleGpus(tuple(chosen), "--gpus", variables, tuple(notes))


AMD = Vendor(
    "amd",
    "AMD",
    "cuda",
    read_amd,
    _apply_rocm_masks,
    _select,
    backend="nccl",
    masks=(ROCR, HIP),
    hide_all_variables={HIP: "-1"},
)
"""torch's ROCm build answers to "cuda"."""
