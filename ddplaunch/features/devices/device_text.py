"""The text of the devices: a row for each GPU, and lines on the CPUs and on what a job sees."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.text import format_count, format_size
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance
from ddplaunch.system.plan.numbers import format_cpulist

GIB = 1 << 30
HIDDEN_TEXT = "hidden"


class DeviceRow(Struct, frozen=True):
    """The cells of one GPU or MIG instance; "" where there is no value."""

    gpu: str  # "0"; "0:1" for the second MIG instance of GPU 0
    torch: str  # "cuda:0"; "hidden" where a job does not see it
    name: str
    memory: str
    numa: str = ""
    cpus: str = ""
    pci: str = ""
    uuid: str = ""
    used_by: str = ""  # one line for each process


def torch_names(visible: VisibleGpus) -> dict[tuple[Gpu, MigInstance | None], str]:
    """Return torch's name of each GPU or MIG instance that a job sees."""
    return {(device.gpu, device.mig): name for device, name in zip(visible.gpus, visible.devices, strict=True)}


def build_rows(hardware: Hardware, visible: VisibleGpus) -> list[DeviceRow]:
    """Return a row for each GPU and MIG instance."""
    names = torch_names(visible)
    rows = []
    for gpu in hardware.gpus:
        rows.append(
            DeviceRow(
                gpu=str(gpu.index),
                torch="MIG" if gpu.mig else names.get((gpu, None), HIDDEN_TEXT),
                name=gpu.name,
                memory=_format_memory(gpu.memory_used, gpu.memory_total),
                numa="" if gpu.numa_node is None else str(gpu.numa_node),
                cpus=format_cpulist(gpu.cpus),
                pci=gpu.pci or "",
                uuid=gpu.uuid or "",
                used_by="\n".join(map(_process, gpu.processes)),
            )
        )
        for index, mig in enumerate(gpu.mig):
            device, memory = names.get((gpu, mig), HIDDEN_TEXT), _format_memory(None, mig.memory_total)
            rows.append(DeviceRow(f"{gpu.index}:{index}", device, mig.name, memory, uuid=mig.uuid))
    return rows


def _format_memory(used: int | None, total: int | None) -> str:
    if total is None:
        return ""
    return f"{total / GIB:.1f} GiB" if used is None else f"{used / GIB:.1f} of {total / GIB:.1f} GiB"


def _process(process: GpuProcess) -> str:
    """Name a process: "python 4242 (alice, 12.3 GiB)"."""
    about = ", ".join(filter(None, (process.user, "" if process.memory is None else format_size(process.memory))))
    return f"{process.name or 'process'} {process.pid}" + (f" ({about})" if about else "")


def describe_cpus(cpu: Cpu) -> str:
    """Return one line of text on the machine's CPUs and memory."""
    allowed = "" if len(cpu.allowed) == cpu.logical else f", {len(cpu.allowed)} allowed ({format_cpulist(cpu.allowed)})"
    quota = "" if cpu.quota is None else f", the time of {cpu.quota:g} (the container's quota)"
    parts = [
        cpu.name or "CPU",
        f"{format_count(cpu.logical, 'CPU')}{allowed}{quota}, {format_count(cpu.physical, 'core')}",
        format_count(len(cpu.numa), "NUMA node"),
    ]
    if cpu.memory_total is not None:
        available = "" if cpu.memory_available is None else f", {cpu.memory_available / GIB:.1f} available"
        parts.append(f"{cpu.memory_total / GIB:.1f} GiB memory{available}")
    return "; ".join(parts)


def describe_gpus(hardware: Hardware, visible: VisibleGpus) -> str:
    """Return one line of text on the GPUs that a job sees."""
    if hardware.gpus:
        count = format_count(len(visible.gpus), "GPU") if visible.gpus else "no GPU"
        return f"A job sees {count} (source: {visible.source})."
    if hardware.gpu_evidence:
        return f"{hardware.gpu_evidence}, but no GPU works: jobs will run on CPUs only with --gpus none."
    return "No GPU found: jobs will run on CPUs."


def format_plain(hardware: Hardware, visible: VisibleGpus) -> str:
    """Return the devices as lines without colour, with aligned columns."""
    table = [
        (
            f"gpu {row.gpu}",
            row.torch,
            row.name,
            row.memory or "-",
            f"numa {row.numa or '-'}",
            f"cpus {row.cpus or '-'}",
            row.pci or "-",
            row.uuid or "-",
            f"used by {', '.join(row.used_by.splitlines())}" if row.used_by else "",
        )
        for row in build_rows(hardware, visible)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"cpu    {describe_cpus(hardware.cpu)}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
    lines.append(describe_gpus(hardware, visible))
    lines += [f"note: {note}" for note in (*hardware.notes, *visible.notes)]
    return "".join(f"{line.rstrip()}\n" for line in lines)
