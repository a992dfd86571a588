"""``ddplaunch devices``: what this machine has, who uses it, and what a job would see of it.

A table in a terminal, plain lines in a pipe and one JSON object say the same.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, Literal, TextIO

import click

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.devices import read_hardware
from ddplaunch.devices.machine import claim
from ddplaunch.devices.vendor import Visible
from ddplaunch.devices.visible import visible_gpus
from ddplaunch.plan.hardware import Cpu, Gpu, GpuProcess, Hardware, MigInstance
from ddplaunch.plan.make import JobSpec
from ddplaunch.plan.numbers import format_cpulist
from ddplaunch.words import counted, size

GIB = 1 << 30

HIDDEN = "hidden"

UNIQUE_ENOUGH = 12
"""Characters of a MIG UUID that name it in a narrow terminal, where ``--gpus`` takes any unique beginning."""


@dataclass(frozen=True)
class DeviceRow:
    """One GPU, or one MIG instance below it, in words; "" where there is nothing to say."""

    gpu: str  # "0"; "0:1" for the second MIG instance of GPU 0
    torch: str  # "cuda:0"; "hidden" where a job does not see it
    name: str
    memory: str
    numa: str = ""
    cpus: str = ""
    pci: str = ""
    uuid: str = ""
    used_by: str = ""  # a process a line


@dataclass(frozen=True)
class Column:
    """One column of the table; ``field`` is the DeviceRow's."""

    field: str
    title: str
    style: str = ""
    justify: Literal["left", "right"] = "left"
    wraps: int = 0  # may be folded to this width; 0: only where nothing else helps


COLUMNS = (
    Column("gpu", "GPU"),
    Column("torch", "Device", "bold green"),
    Column("name", "Name"),
    Column("memory", "Memory", justify="right"),
    Column("numa", "NUMA"),
    Column("cpus", "CPUs"),
    Column("pci", "PCI", "dim"),
    Column("uuid", "UUID", "dim"),
    Column("used_by", "Used by", "bold red", wraps=18),
)

GAP = 2  # characters between two columns

DISPENSABLE = ("pci", "cpus", "uuid")
"""Columns that a narrow terminal does without, the first to go first."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def devices(as_json: bool) -> None:
    """Show the GPUs and CPUs of this machine.

    Lists every GPU with its torch name, memory, NUMA node and users, and says which of them a job would see
    (CUDA_VISIBLE_DEVICES and the like are respected). The index, the UUID or the beginning of a UUID is what
    `run --gpus` takes.
    """
    hardware = read_hardware(processes=True)
    visible = visible_gpus(hardware, None, os.environ)
    if as_json:
        click.echo(json.dumps(devices_json(hardware, visible), indent=2))
    else:
        hardware = replace(hardware, failed=claim(hardware, visible, os.environ, JobSpec()))
        render_devices(hardware, visible, sys.stdout)


def render_devices(hardware: Hardware, visible: Visible, out: TextIO) -> None:
    """Write the devices to ``out``: a table where it is a terminal, else aligned plain text with one GPU a line."""
    if out.isatty():
        _write_table(hardware, visible, out)
    else:
        out.write(_plain_text(hardware, visible))


def devices_json(hardware: Hardware, visible: Visible) -> dict[str, Any]:
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
    told = {**dict.fromkeys(first), **asdict(cpu), "allowed": format_cpulist(cpu.allowed)}
    return {**told, "numa": [{**asdict(node), "cpus": format_cpulist(node.cpus)} for node in cpu.numa]}


def _gpu_json(gpu: Gpu, names: dict[tuple[Gpu, MigInstance | None], str]) -> dict[str, Any]:
    told = {**dict.fromkeys(("vendor", "index", "device", "name", "uuid", "pci", "driver")), **asdict(gpu)}
    told |= {"device": names.get((gpu, None)), "cpus": format_cpulist(gpu.cpus) or None}
    mig = [{"uuid": mig.uuid, "device": names.get((gpu, mig)), **asdict(mig)} for mig in gpu.mig]
    return {**told, "mig": mig, "processes": [asdict(process) for process in gpu.processes]}


def _torch_names(visible: Visible) -> dict[tuple[Gpu, MigInstance | None], str]:
    return {(device.gpu, device.mig): name for device, name in zip(visible.gpus, visible.devices, strict=True)}


def _rows(hardware: Hardware, visible: Visible) -> list[DeviceRow]:
    names = _torch_names(visible)
    rows = []
    for gpu in hardware.gpus:
        rows.append(
            DeviceRow(
                gpu=str(gpu.index),
                torch="MIG" if gpu.mig else names.get((gpu, None), HIDDEN),
                name=gpu.name,
                memory=_memory(gpu.memory_used, gpu.memory_total),
                numa="" if gpu.numa_node is None else str(gpu.numa_node),
                cpus=format_cpulist(gpu.cpus),
                pci=gpu.pci or "",
                uuid=gpu.uuid or "",
                used_by="\n".join(map(_process, gpu.processes)),
            )
        )
        for index, mig in enumerate(gpu.mig):
            device, memory = names.get((gpu, mig), HIDDEN), _memory(None, mig.memory_total)
            rows.append(DeviceRow(f"{gpu.index}:{index}", device, mig.name, memory, uuid=mig.uuid))
    return rows


def _memory(used: int | None, total: int | None) -> str:
    if total is None:
        return ""
    return f"{total / GIB:.1f} GiB" if used is None else f"{used / GIB:.1f} of {total / GIB:.1f} GiB"


def _process(process: GpuProcess) -> str:
    """Name a process: "python 4242 (alice, 12.3 GiB)"."""
    about = ", ".join(filter(None, (process.user, "" if process.memory is None else size(process.memory))))
    return f"{process.name or 'process'} {process.pid}" + (f" ({about})" if about else "")


def _cpu_line(cpu: Cpu) -> str:
    allowed = "" if len(cpu.allowed) == cpu.logical else f", {len(cpu.allowed)} allowed ({format_cpulist(cpu.allowed)})"
    quota = "" if cpu.quota is None else f", the time of {cpu.quota:g} (the container's quota)"
    parts = [
        cpu.name or "CPU",
        f"{counted(cpu.logical, 'CPU')}{allowed}{quota}, {counted(cpu.physical, 'core')}",
        counted(len(cpu.numa), "NUMA node"),
    ]
    if cpu.memory_total is not None:
        available = "" if cpu.memory_available is None else f", {cpu.memory_available / GIB:.1f} available"
        parts.append(f"{cpu.memory_total / GIB:.1f} GiB memory{available}")
    return "; ".join(parts)


def _gpu_line(hardware: Hardware, visible: Visible) -> str:
    if hardware.gpus:
        count = counted(len(visible.gpus), "GPU") if visible.gpus else "no GPU"
        return f"A job sees {count} (source: {visible.source})."
    if hardware.failed:
        return f"{hardware.failed}, but no GPU works: a job runs on the CPUs only with --gpus none."
    return "No GPU found: a job runs on the CPUs."


def _plain_text(hardware: Hardware, visible: Visible) -> str:
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
        for row in _rows(hardware, visible)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"cpu    {_cpu_line(hardware.cpu)}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table]
    lines.append(_gpu_line(hardware, visible))
    lines += [f"note: {note}" for note in (*hardware.notes, *visible.notes)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _write_table(hardware: Hardware, visible: Visible, out: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)
    console.print(Text(_cpu_line(hardware.cpu)))
    if hardware.gpus:
        columns, rows = _fitting(_rows(hardware, visible), console.width)
        tight = not _fits(columns, rows, console.width)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column.title, justify=column.justify, no_wrap=not (column.wraps or tight), overflow="fold")
        for row in rows:
            dimmed = "dim" if row.torch == HIDDEN else None
            table.add_row(*(Text(getattr(row, column.field), style=dimmed or column.style) for column in columns))
        console.print()
        console.print(table)
        console.print()
    console.print(Text(_gpu_line(hardware, visible)))
    notes = Table.grid(padding=(0, 1))
    for note in (*hardware.notes, *visible.notes):
        notes.add_row(Text("!", style="bold yellow"), Text(note, style="yellow"))
    if notes.row_count:
        console.print(notes)


def _fitting(rows: list[DeviceRow], width: int) -> tuple[list[Column], list[DeviceRow]]:
    """The rows with all columns that have something to say, less those dispensable that do not fit into the width."""
    columns = [column for column in COLUMNS if any(getattr(row, column.field) for row in rows)]
    for dispensable in DISPENSABLE:
        if _fits(columns, rows, width):
            break
        columns = [column for column in columns if column.field != dispensable]
        if dispensable == "uuid":
            rows = [replace(row, name=_short_mig_name(row)) for row in rows]
    return columns, rows


def _fits(columns: list[Column], rows: list[DeviceRow], width: int) -> bool:
    def least_width(column: Column) -> int:
        widest = max(len(line) for row in rows for line in (column.title, *getattr(row, column.field).split("\n")))
        return min(widest, column.wraps or widest)

    return sum(map(least_width, columns)) + GAP * (len(columns) - 1) <= width


def _short_mig_name(row: DeviceRow) -> str:
    """Name a MIG instance if its UUID has no column; to choose it, one needs at least the beginning."""
    return f"{row.name.removeprefix('MIG ')}  {row.uuid[:UNIQUE_ENOUGH]}" if ":" in row.gpu else row.name
