"""Tests of NUMA nodes, with made-up trees, and of the kernel's CPU lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.system.devices.sysfs import read_numa, read_pci_locality
from ddplaunch.system.plan.hardware import NumaNode
from ddplaunch.system.plan.numbers import format_cpulist, parse_cpulist
from tests.system.devices.conftest import MakeTree

NODES = "devices/system/node"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("\n", ()), ("8,0-1", (0, 1, 8)), ("0-1,1-2", (0, 1, 2))],
)
def test_parse_cpulist(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "0,,1", "-"])
def test_invalid_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpulist(text)


@pytest.mark.parametrize(
    ("cpus", "text"),
    [((0, 1, 2, 3, 8), "0-3,8"), ((), ""), ((7,), "7"), ((3, 1, 2, 2), "1-3"), ((0, 2, 4), "0,2,4"), ((4, 5), "4-5")],
)
def test_format_cpulist(cpus: tuple[int, ...], text: str) -> None:
    assert format_cpulist(cpus) == text
    assert parse_cpulist(text) == tuple(sorted(set(cpus)))


def test_nodes_by_number(make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            f"{NODES}/node10/cpulist": "4-5\n",
            f"{NODES}/node2/cpulist": "0-3,8\n",
            f"{NODES}/node2/meminfo": "Node 2 MemTotal:       2048 kB\nNode 2 MemFree:        1024 kB\n",
            f"{NODES}/online": "2,10\n",
        }
    )
    assert read_numa(sysfs, (0,)) == (NumaNode(2, (0, 1, 2, 3, 8), 2048 * 1024), NumaNode(10, (4, 5), None))


def test_a_node_of_memory_alone_is_left_out(make_tree: MakeTree) -> None:
    sysfs = make_tree({f"{NODES}/node0/cpulist": "0-1\n", f"{NODES}/node1/cpulist": "\n"})
    assert [node.index for node in read_numa(sysfs, (0, 1))] == [0]


def test_a_machine_without_the_folder_is_one_node(tmp_path: Path) -> None:
    assert read_numa(tmp_path, (0, 1, 2)) == (NumaNode(0, (0, 1, 2)),)


def test_a_device_without_locality_has_no_node_and_no_cpus(make_tree: MakeTree) -> None:
    sysfs = make_tree({"bus/pci/devices/0000:17:00.0/numa_node": "-1\n"})
    assert read_pci_locality(sysfs, "0000:17:00.0") == (None, ())
    assert read_pci_locality(sysfs, "0000:ff:00.0") == (None, ())
    assert read_pci_locality(sysfs, None) == (None, ())
