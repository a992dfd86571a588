"""Reads the health of NVIDIA's GPUs through NVML: memory errors, throttling, temperature, processes.

Calls into a wedged driver never return, so this runs in a process that may be abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from ddplaunch.base.types import Count, Number, Size, TextLine
from ddplaunch.system.devices.nvidia import open_nvml, query_nvml
from ddplaunch.system.plan.hardware import Gpu, GpuProcess

THROTTLE_REASONS = {
    0x08: "a hardware slowdown",
    0x20: "software, because of heat",
    0x40: "hardware, because of heat",
    0x80: "the power supply (power brake)",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean trouble; the others are normal."""


class GpuHealth(Struct, frozen=True):
    """The health of one GPU; None is unknown."""

    index: Count
    name: TextLine
    driver: TextLine | None
    memory_total: Size | None  # bytes
    memory_used: Size | None
    processes: tuple[GpuProcess, ...]
    temperature: Number | None = None  # degrees Celsius
    slowed_by: tuple[TextLine, ...] = ()
    memory_errors: Size | None = None  # uncorrectable by ECC, since the driver was loaded
    needs_reset: bool = False  # memory rows or pages are waiting to be remapped
    worn_out: bool = False  # memory rows could not be remapped


def read_health(gpus: Sequence[Gpu]) -> tuple[GpuHealth, ...]:
    """Read the health of these GPUs; for other vendors, only the fields that ``gpus`` has are filled in."""
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    return tuple(_health(nvml if gpu.vendor == "nvidia" else None, gpu) for gpu in gpus)


def _health(nvml: Any, gpu: Gpu) -> GpuHealth:
    known = (gpu.index, gpu.name, gpu.driver, gpu.memory_total, gpu.memory_used, gpu.processes)
    handle = nvml and query_nvml(nvml, nvml.nvmlDeviceGetHandleByIndex, gpu.index)
    if handle is None:
        return GpuHealth(*known)
    query = partial(query_nvml, nvml)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    remapped = query(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
    retired = query(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) or 0
    ecc_errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return GpuHealth(
        *known,
        temperature=query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        slowed_by=tuple(text for bit, text in THROTTLE_REASONS.items() if reasons & bit),
        memory_errors=query(nvml.nvmlDeviceGetTotalEccErrors, handle, *ecc_errors),
        needs_reset=bool(remapped[2] or retired),
        worn_out=bool(remapped[3]),
    )
