"""Prints the devices as a table on a terminal; imported only for one, as rich takes longer than all else."""

from __future__ import annotations

from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddplaunch.features.devices.device_text import HIDDEN_TEXT, DeviceRow, build_rows, describe_cpus, describe_gpus
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.plan.hardware import Hardware

MIN_UUID_CHARS = 12
"""Characters of a MIG UUID that name it in a narrow terminal, where ``--gpus`` takes any unique beginning."""

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
"""The width, in characters, to which column ``used_by`` is folded in a narrow terminal."""

OPTIONAL_COLUMNS = ("cpus", "pci", "uuid")
"""Left out in a narrow terminal."""


def write_table(hardware: Hardware, visible: VisibleGpus) -> None:
    """Print the devices; a narrow terminal gets fewer columns."""
    console = Console(highlight=False)
    console.print(Text(describe_cpus(hardware.cpu)))
    if hardware.gpus:
        rows = build_rows(hardware, visible)
        table = _build_table(rows, narrow=False)
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum > console.width:
            table = _build_table(rows, narrow=True)
        console.print()
        console.print(table)
        console.print()
    console.print(Text(describe_gpus(hardware, visible)))
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
        rows = [replace(row, name=_name_with_short_uuid(row)) for row in rows]
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


def _name_with_short_uuid(row: DeviceRow) -> str:
    """Return the name of a GPU; of a MIG instance with the beginning of its UUID, which is needed to choose it."""
    return f"{row.name.removeprefix('MIG ')}  {row.uuid[:MIN_UUID_CHARS]}" if ":" in row.gpu else row.name
