"""Tests of the CPU reader, with made-up trees and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddplaunch.system.devices.cpu import read_cpu
from ddplaunch.system.plan.hardware import Cpu
from tests.system.devices.conftest import MakeTree

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


QUOTAS = [
    ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),  # docker run --cpus 4, as seen inside
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/\n", {}, None),  # the root of a machine has no such file
    ("0::/pod/container\n", {"pod/cpu.max": "250000 100000\n", "pod/container/cpu.max": "max 100000\n"}, 2.5),
    ("0::/pod/container\n", {"pod/cpu.max": "250000 100000\n", "pod/container/cpu.max": "50000 100000\n"}, 0.5),
    (
        "4:cpu,cpuacct:/a\n",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
        3,
    ),
    ("1:cpu:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
    ("1:cpuset:/a\n", {"cpuset/a/cpu.max": "100000 100000\n"}, None),
    ("0::/\n", {"cpu.max": "junk\n"}, None),
]
"""The lines of /proc/self/cgroup, files below /sys/fs/cgroup, CPUs' time."""


@pytest.mark.parametrize(("groups", "files", "quota"), QUOTAS)
def test_a_containers_share_of_the_time(
    make_tree: MakeTree, groups: str, files: dict[str, str], quota: float | None
) -> None:
    root = make_tree({"self/cgroup": groups, **{f"fs/cgroup/{name}": text for name, text in files.items()}})
    assert read_cpu(root, proc=root).quota == quota


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (2.5, 2), (0.5, 1), (100, 8)])
def test_how_many_cpus_can_be_kept_busy(quota: float | None, usable: int) -> None:
    assert Cpu(None, 16, 4, tuple(range(8)), (), quota=quota).usable_count == usable


def test_the_quota_of_this_machines_kernel() -> None:
    """The kernel's quota is read from a real control group, if this machine permits one."""
    group = Path("/sys/fs/cgroup") / ("cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "") / f"ddplaunch-{os.getpid()}"
    files = {"cpu.max": "50000 100000"} if group.parent.name != "cpu" else {"cpu.cfs_quota_us": "50000"}
    try:
        group.mkdir()
        for name, text in files.items():
            (group / name).write_text(text)
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    statement = "from ddplaunch.system.devices.cpu import read_cpu"
    shows = f"from pathlib import Path; {statement}; print(read_cpu(Path('/sys')).quota)"
    join = f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "{shows}"'
    try:
        assert subprocess.run(["sh", "-c", join], capture_output=True, text=True).stdout == "0.5\n"
    finally:
        group.rmdir()
