"""What the kernel's files say: one value, the NUMA nodes, and which node and CPUs a PCI device sits beside."""

from __future__ import annotations

import re
from pathlib import Path

from ddplaunch.plan.cpulist import parse_cpulist
from ddplaunch.plan.hardware import NumaNode

NODE_MEMORY = re.compile(r"MemTotal:\s+(\d+) kB")  # in node*/meminfo: "Node 0 MemTotal:       527988832 kB"


def read_text(path: Path) -> str | None:
    """Return what the file says, stripped; None where it is absent or may not be read.

    A driver may also fail the read itself, for a GPU off its bus or outside of our cgroup; that is an OSError too.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number in the file, decimal or 0x…; None where there is none."""
    try:
        return int(read_text(path) or "", base=0)
    except ValueError:
        return None


def read_numa(sysfs: Path, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have CPUs; one node 0 of all ``online`` CPUs where the kernel names none.

    A node of memory alone (HBM, CXL, the memory of a Grace Hopper GPU) is left out: no process can run on it.
    """
    nodes = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpulist(read_text(folder / "cpulist") or "")
        if cpus:
            memory = NODE_MEMORY.search(read_text(folder / "meminfo") or "")
            nodes.append(NumaNode(int(folder.name[4:]), cpus, int(memory[1]) * 1024 if memory else None))
    return tuple(sorted(nodes, key=lambda node: node.index)) or (NumaNode(0, online),)


def read_beside(sysfs: Path, pci: str | None) -> tuple[int | None, tuple[int, ...]]:
    """Return the NUMA node and the CPUs beside the device at this PCI address; None and () if unknown.

    The kernel writes node -1 for "not known" (``Documentation/ABI/testing/sysfs-bus-pci``).
    """
    if pci is None:
        return None, ()
    device = sysfs / "bus/pci/devices" / pci
    node = read_int(device / "numa_node")
    cpus = parse_cpulist(read_text(device / "local_cpulist") or "")
    return (None if node is None or node < 0 else node), cpus
