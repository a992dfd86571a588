"""``ddplaunch devices``: lists the CPUs and GPUs of this machine, their users, and which GPUs a job would see.

As a table in a terminal, as plain lines in a pipe, or as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddplaunch.base.text import format_count, format_size
from ddplaunch.base.types import as_dict
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.machine import gpu_evidence
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance
from ddplaunch.system.plan.numbers import format_cpulist
from ddplaunch.system.plan.planner import PlanSpec

GIB = 1 << 30

HIDDEN_TEXT = "hidden"

MIN_UUID_CHARS = 12
"""Characters of a MIG UUID that name it in a narrow terminal, where ``--gpus`` takes any unique beginning."""


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


COLUMNS = {
    "gpu": ("GPU", ""),
    "torch": ("Device", "bold green"),
    "name": ("Name", ""),
    "memory": ("Memory", ""),
    "numa": ("NUMA", ""),
    "cpus": ("CPUs", ""),
    "pci": ("PCI", "dim"),
    "uuid": ("UUID", "dim"),
    "used_by": ("Used by", "bold red"),
}
"""Of the table in a terminal: a field of ``DeviceRow``, its title and its style."""

USED_BY_WIDTH = 18
"""Characters to which a narrow terminal folds that column."""

OPTIONAL_COLUMNS = ("cpus", "pci", "uuid")
"""Left out in a narrow terminal."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def devices(as_json: bool) -> None:
    """List the GPUs and CPUs of this machine.

    Shows the torch name, memory, NUMA node and users of every GPU, and which GPUs a job would see (respects
    CUDA_VISIBLE_DEVICES and the like). `run --gpus` takes the index, the UUID or the beginning of a UUID.
    """
    hardware = read_hardware(processes=True)
    visible = visible_gpus(hardware, None, os.environ)
    if as_json:
        return click.echo(json.dumps(devices_json(hardware, visible), indent=2))
    hardware = replace(hardware, gpu_evidence=gpu_evidence(hardware, visible, os.environ, PlanSpec()))
    if sys.stdout.isatty():
        _write_table(hardware, visible)
    else:
        click.echo(_format_plain(hardware, visible), nl=False)


def devices_json(hardware: Hardware, visible: VisibleGpus) -> dict[str, Any]:
    """Return the devices as JSON types: sizes are bytes, CPU sets kernel lists ("0-3,8"), null is unknown.

    ``device`` is torch's name of a GPU or MIG instance, null where a job does not see it.
    """
    names = _torch_names(visible)
    return {
        "cpu": _cpu_json(hardware.cpu),
        "gpus": [_gpu_json(gpu, names) for gpu in hardware.gpus],
        "visible": {
            "source": visible.source,
            "devices": [
                {"device": name, "gpu": device.gpu.index, "vendor": device.gpu.vendor, "token": device.token}
                for name, device in zip(visible.devices, visible.gpus, strict=True)
            ],
        },
        "notes": [*hardware.notes, *visible.notes],
    }


def _cpu_json(cpu: Cpu) -> dict[str, Any]:
    first = ("name", "logical", "physical", "allowed", "quota", "memory_total", "memory_available")
    fields = {**dict.fromkeys(first), **as_dict(cpu), "allowed": format_cpulist(cpu.allowed)}
    return {**fields, "numa": [{**as_dict(node), "cpus": format_cpulist(node.cpus)} for node in cpu.numa]}


def _gpu_json(gpu: Gpu, names: dict[tuple[Gpu, MigInstance | None], str]) -> dict[str, Any]:
    fields = {**dict.fromkeys(("vendor", "index", "device", "name", "uuid", "pci", "driver")), **as_dict(gpu)}
    fields |= {"device": names.get((gpu, None)), "cpus": format_cpulist(gpu.cpus) or None}
    mig = [{"uuid": mig.uuid, "device": names.get((gpu, mig)), **as_dict(mig)} for mig in gpu.mig]
    return {**fields, "mig": mig, "processes": [as_dict(process) for process in gpu.processes]}


def _torch_names(visible: VisibleGpus) -> dict[tuple[Gpu, MigInstance | None], str]:
    return {(device.gpu, device.mig): name for device, name in zip(visible.gpus, visible.devices, strict=True)}


def _build_rows(hardware: Hardware, visible: VisibleGpus) -> list[DeviceRow]:
    names = _torch_names(visible)
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


def _describe_cpus(cpu: Cpu) -> str:
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


def _describe_gpus(hardware: Hardware, visible: VisibleGpus) -> str:
    if hardware.gpus:
        count = format_count(len(visible.gpus), "GPU") if visible.gpus else "no GPU"
        return f"A job sees {count} (source: {visible.source})."
    if hardware.gpu_evidence:
        return f"{hardware.gpu_evidence}, but no GPU works: a job runs on the CPUs only with --gpus none."
    return "No GPU found: a job runs on the CPUs."


def _format_plain(hardware: Hardware, visible: VisibleGpus) -> str:
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
        for row in _build_rows(hardware, visible)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"cpu    {_describe_cpus(hardware.cpu)}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
    lines.append(_describe_gpus(hardware, visible))
    lines += [f"note: {note}" for note in (*hardware.notes, *visible.notes)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _write_table(hardware: Hardware, visible: VisibleGpus) -> None:
    console = Console(highlight=False)
    console.print(Text(_describe_cpus(hardware.cpu)))
    if hardware.gpus:
        rows = _build_rows(hardware, visible)
        table = _build_table(rows, narrow=False)
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum > console.width:
            table = _build_table(rows, narrow=True)
        console.print()
        console.print(table)
        console.print()
    console.print(Text(_describe_gpus(hardware, visible)))
    notes = Table.grid(padding=(0, 1))
    for note in (*hardware.notes, *visible.notes):
        notes.add_row(Text("!", style="bold yellow"), Text(note, style="yellow"))
    if notes.row_count:
        console.print(notes)


def _build_table(rows: list[DeviceRow], *, narrow: bool) -> Table:
    """Build the table of all columns that have values; ``narrow``: without OPTIONAL_COLUMNS."""
    shown = [field for field in COLUMNS if any(getattr(row, field) for row in rows)]
    if narrow:
        shown = [field for field in shown if field not in OPTIONAL_COLUMNS]
        rows = [replace(row, name=_short_mig_name(row)) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False, header_style="bold")
    for field in shown:
        folds = field == "used_by"
        table.add_column(
            COLUMNS[field][0],
            justify="right" if field == "memory" else "left",
            overflow="fold",
            min_width=USED_BY_WIDTH if folds else None,
            no_wrap=not folds,
        )
    for row in rows:
        dimmed = "dim" if row.torch == HIDDEN_TEXT else None
        table.add_row(*(Text(getattr(row, field), style=dimmed or COLUMNS[field][1]) for field in shown))
    return table


def _short_mig_name(row: DeviceRow) -> str:
    """Name a MIG instance if its UUID has no column; to choose it, one needs at least the beginning."""
    return f"{row.name.removeprefix('MIG ')}  {row.uuid[:MIN_UUID_CHARS]}" if ":" in row.gpu else row.name
