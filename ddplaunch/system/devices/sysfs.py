"""Reads the kernel's files: single values, NUMA nodes, and the NUMA node and CPUs near a PCI device."""

from __future__ import annotations

import os
import re

from ddplaunch.system.plan.hardware import NumaNode
from ddplaunch.system.plan.numbers import parse_cpulist

NODE_MEMORY = re.compile(r"MemTotal:\s+(\d+) kB")  # in node*/meminfo: "Node 0 MemTotal:       527988832 kB"


Folder = str | os.PathLike[str]
"""A kernel file system such as /sys, or a test's copy."""


def list_numbered(folder: str, name: str) -> list[tuple[str, str]]:
    """List the entries of a folder that are ``name`` and a number: paths, and what follows ``name``."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    found = [(f"{folder}/{each}", each.removeprefix(name)) for each in entries if each.startswith(name)]
    return [(path, number) for path, number in found if number[:1].isdecimal()]


def read_text(path: str) -> str | None:
    """Return the stripped text of a file; None if it does not exist or cannot be read.

    A driver may fail the read itself, for a GPU off its bus or outside of this cgroup; that is an OSError too.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def read_int(path: str) -> int | None:
    """Return the number in a file, decimal or 0x…; None if there is none."""
    try:
        return int(read_text(path) or "", base=0)
    except ValueError:
        return None


def read_numa(sysfs: Folder, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes that have CPUs; one node 0 with all ``online`` CPUs if the kernel lists none.

    A node of memory alone (HBM, CXL, the memory of a Grace Hopper GPU) is left out: no process can run on it.
    """
    nodes = []
    for folder, number in list_numbered(os.path.join(sysfs, "devices/system/node"), "node"):
        cpus = parse_cpulist(read_text(f"{folder}/cpulist") or "")
        if cpus:
            memory = NODE_MEMORY.search(read_text(f"{folder}/meminfo") or "")
            nodes.append(NumaNode(int(number), cpus, int(memory[1]) * 1024 if memory else None))
    return tuple(sorted(nodes, key=lambda node: node.index)) or (NumaNode(0, online),)


def read_pci_locality(sysfs: Folder, pci: str | None) -> tuple[int | None, tuple[int, ...]]:
    """Return the NUMA node and the CPUs near the device at this PCI address; None and () if unknown.

    The kernel writes node -1 for "not known" (``Documentation/ABI/testing/sysfs-bus-pci``).
    """
    if pci is None:
        return None, ()
    device = os.path.join(sysfs, "bus/pci/devices", pci)
    node = read_int(f"{device}/numa_node")
    cpus = parse_cpulist(read_text(f"{device}/local_cpulist") or "")
    return (None if node is None or node < 0 else node), cpus
