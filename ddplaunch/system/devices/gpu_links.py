"""How near the GPUs of this machine are to each other: by NVLink, by PCI switches, or by NUMA node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from ddplaunch.system.devices.nvidia import open_nvml, query_nvml
from ddplaunch.system.plan.hardware import Gpu

SAME_NODE, OTHER_NODE = 40, 50
"""Distances by NUMA node: those of NVML_TOPOLOGY_NODE and NVML_TOPOLOGY_SYSTEM. A PCI switch in common is 10 to 20."""


def read_gpu_distances(gpus: Sequence[Gpu]) -> dict[tuple[int, int], int]:
    """Return the distance of each pair of GPUs, the lower index first: 0 for NVLink, else NVML's level."""
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    handles = {}
    if nvml:
        handles = {gpu.index: query_nvml(nvml, nvml.nvmlDeviceGetHandleByIndex, gpu.index) for gpu in gpus}
    distances = {}
    for one, other in combinations(sorted(gpus, key=lambda gpu: gpu.index), 2):
        pair = handles.get(one.index), handles.get(other.index)
        level = _nvml_distance(nvml, *pair) if all(pair) else None
        by_node = SAME_NODE if one.numa_node == other.numa_node else OTHER_NODE
        distances[one.index, other.index] = by_node if level is None else level
    return distances


def _nvml_distance(nvml: Any, one: Any, other: Any) -> int | None:
    if query_nvml(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
        return 0
    level: int | None = query_nvml(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return level
