"""What ails NVIDIA's GPUs: errors of memory, clocks held down, heat; and who uses them. Asked of NVML.

A wedged driver hangs who asks it, so this is for a process that may be left behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.nvidia import open_nvml
from ddplaunch.plan.hardware import Gpu, GpuProcess

if TYPE_CHECKING:
    from typing import Any

    from ddplaunch.wire.bounds import Count, Number, Size, TextLine

THROTTLE_REASONS = {
    0x08: "a hardware slowdown",
    0x20: "software, because of heat",
    0x40: "hardware, because of heat",
    0x80: "the power supply (power brake)",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean trouble; the others are normal."""


NVLINK_ERRORS = {"replays": 0, "recoveries": 1, "CRC errors of flits": 2, "CRC errors of data": 3}
"""NVML_NVLINK_ERROR_DL_* (nvml.h)."""


@dataclass(frozen=True)
class GpuHealth:
    """One GPU; None is not known."""

    index: Count
    name: TextLine
    driver: TextLine | None
    memory_total: Size | None  # bytes
    memory_used: Size | None
    processes: tuple[GpuProcess, ...]
    temperature: Number | None = None  # degrees Celsius
    slowed_by: tuple[TextLine, ...] = ()
    memory_errors: Size | None = None  # that ECC could not correct, since the driver was loaded
    needs_reset: bool = False  # rows or pages of memory wait to be replaced
    worn_out: bool = False  # rows of memory could not be replaced


@dataclass(frozen=True)
class NvLinks:
    """Those of one GPU."""

    gpu: Count
    active: Count
    down: Count
    errors: tuple[tuple[TextLine, Size], ...]  # what, and how many since the driver was loaded


def read_nvlinks(gpus: Sequence[Gpu]) -> tuple[NvLinks, ...]:
    """Ask for the NVLinks of these GPUs; of one without any nothing is told."""
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    asked = (_nvlinks(nvml, gpu) for gpu in gpus if nvml and gpu.vendor == "nvidia")
    return tuple(links for links in asked if links)


def _nvlinks(nvml: Any, gpu: Gpu) -> NvLinks | None:
    states: list[int] = []
    errors: dict[str, int] = {}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link))
            for what, counter in NVLINK_ERRORS.items():
                try:
                    count = nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
                except nvml.NVMLError:  # this link is down, or this GPU does not count them
                    continue
                errors[what] = errors.get(what, 0) + count
    except nvml.NVMLError:  # there are no more
        pass
    counted = tuple((what, count) for what, count in errors.items() if count)
    return NvLinks(gpu.index, sum(map(bool, states)), states.count(0), counted) if states else None


def read_health(gpus: Sequence[Gpu]) -> tuple[GpuHealth, ...]:
    """Ask how these GPUs are; of those that are not NVIDIA's only what is known already is told."""
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    return tuple(_health(nvml if gpu.vendor == "nvidia" else None, gpu) for gpu in gpus)


def _health(nvml: Any, gpu: Gpu) -> GpuHealth:
    known = (gpu.index, gpu.name, gpu.driver, gpu.memory_total, gpu.memory_used, gpu.processes)
    if nvml is None:
        return GpuHealth(*known)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    except nvml.NVMLError:
        return GpuHealth(*known)

    def ask(question: str, *words: Any) -> Any:
        try:
            return getattr(nvml, question)(handle, *words)
        except nvml.NVMLError:  # this GPU, this driver or our permissions have no answer
            return None

    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    remapped = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
    retired = ask("nvmlDeviceGetRetiredPagesPendingStatus") or 0
    return GpuHealth(
        *known,
        temperature=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slowed_by=tuple(text for bit, text in THROTTLE_REASONS.items() if reasons & bit),
        memory_errors=ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        needs_reset=bool(remapped[2] or retired),
        worn_out=bool(remapped[3]),
    )
