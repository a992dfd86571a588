"""The processors, from made trees and from this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from ddplaunch.devices.cpu import read_cpu
from tests.devices.conftest import MakeTree

CPUS = "devices/system/cpu"


def threads(cores: int, per_core: int = 2) -> dict[str, str]:
    """A machine's CPUs numbered as on x86: CPU n and CPU n + cores share core n."""
    files = {f"{CPUS}/online": f"0-{cores * per_core - 1}\n"}
    for cpu in range(cores * per_core):
        siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(per_core))
        files[f"{CPUS}/cpu{cpu}/topology/thread_siblings_list"] = f"{siblings}\n"
    return files


def allow(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)


def test_a_whole_machine(make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, *range(8))
    proc = {
        "cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n\nprocessor\t: 1\n",
        "meminfo": "MemTotal:       16000 kB\nMemFree:        100 kB\nMemAvailable:   8000 kB\n",
    }
    root = make_tree({**threads(cores=4), **proc, "devices/system/node/node0/cpulist": "0-7\n"})
    cpu = read_cpu(root, proc=root)
    assert cpu.name == "AMD EPYC 9654 96-Core Processor"
    assert (cpu.logical, cpu.physical, cpu.allowed) == (8, 4, tuple(range(8)))
    assert (cpu.memory_total, cpu.memory_available) == (16000 * 1024, 8000 * 1024)
    assert [node.cpus for node in cpu.numa] == [tuple(range(8))]


@pytest.mark.parametrize(("allowed", "cores"), [((0, 4), 1), ((0, 1), 2), ((2, 6, 7), 2), ((5,), 1)])
def test_cores_are_those_of_the_allowed_cpus(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch, allowed: tuple[int, ...], cores: int
) -> None:
    allow(monkeypatch, *allowed)
    cpu = read_cpu(make_tree(threads(cores=4)))
    assert (cpu.logical, cpu.physical, cpu.allowed) == (8, cores, allowed)


def test_without_kernel_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0, 1)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    cpu = read_cpu(tmp_path, proc=tmp_path)
    assert cpu.name is None
    assert cpu.logical == os.cpu_count()
    assert cpu.physical == 2  # never more cores than allowed CPUs
    assert cpu.memory_total == psutil.virtual_memory().total


def test_a_system_without_affinity_allows_all(make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert read_cpu(make_tree(threads(cores=2))).allowed == (0, 1, 2, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")
def test_this_machine_as_psutil_sees_it() -> None:
    cpu = read_cpu(Path("/sys"))
    assert cpu.logical == psutil.cpu_count()
    assert cpu.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= cpu.physical <= len(cpu.allowed)
    assert cpu.memory_total == psutil.virtual_memory().total
    assert {core for node in cpu.numa for core in node.cpus} == set(range(cpu.logical))
