"""Tests of the NVIDIA reader, with a fake NVML, in processes of their own."""

from __future__ import annotations

import ctypes
import getpass
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.system.devices.nvidia import read_nvidia
from ddplaunch.system.devices.vendor import KernelTrees
from ddplaunch.system.plan.hardware import Gpu
from tests.fake_nvml import (
    DRIVER_NOT_LOADED,
    H100,
    LIBRARY_MISMATCH,
    NO_PERMISSION,
    ROOT,
    FakeNvml,
    clean_environ,
    read_in,
)
from tests.system.devices.conftest import MakeTree

MIB = 1 << 20
NO_PROCESS = 2**22 + 1  # PID_MAX_LIMIT of Linux and one


def test_every_gpu_with_its_facts(fake_nvml: FakeNvml) -> None:
    hardware = fake_nvml.read([H100, "NVIDIA A100-SXM4-40GB"], memory_mb=1000)
    first, second = hardware.gpus
    assert (first.vendor, first.index, first.name) == ("nvidia", 0, H100)
    assert (second.index, second.name) == (1, "NVIDIA A100-SXM4-40GB")
    assert first.uuid == "GPU-fa4e0000-0000-0000-0000-000000000000"
    assert second.pci == "0000:18:00.0"
    assert first.memory_total == 1000 * MIB
    assert first.memory_used == 1 * MIB
    assert first.driver == "570.86.15"
    assert first.mig == ()
    assert first.processes == ()
    assert hardware.notes == ()


FABRIC = "c0ffee00111122223333444455556666"


def test_the_nvlink_domain_that_reaches_other_machines(fake_nvml: FakeNvml) -> None:
    fabrics = f"{FABRIC}:7:3;{FABRIC}:0:3;{FABRIC}:7:2;{'0' * 32}:7:3"  # the third has not joined yet
    hardware = fake_nvml.read(5, fabrics=fabrics)
    names = [f"c0ffee00-1111-2222-3333-444455556666.{clique}" for clique in (7, 0)]
    assert [gpu.fabric for gpu in hardware.gpus] == [*names, None, None, None]
    assert hardware.notes == ()
    assert fake_nvml.read(1, fabrics=f"{FABRIC}:7:3", mig={0: 2}).gpus[0].fabric is None


@pytest.mark.parametrize("missing", ["nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"])
def test_older_bindings_report_no_nvlink_domain(fake_nvml: FakeNvml, missing: str) -> None:
    code = f"import pynvml; del pynvml.{missing}\n"
    code += "from ddplaunch.system.devices import read_hardware\n"
    code += "found = read_hardware(); print([gpu.fabric for gpu in found.gpus], found.notes)"
    environ = fake_nvml.environ(1, fabrics=f"{FABRIC}:7:3")
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[None] ()\n", "")


def test_locality_is_read_from_sysfs(fake_nvml: FakeNvml, make_tree: MakeTree) -> None:
    sysfs = make_tree(
        {
            "bus/pci/devices/0000:10:00.0/numa_node": "3\n",
            "bus/pci/devices/0000:10:00.0/local_cpulist": "48-63,112-127\n",
        }
    )
    (gpu,) = fake_nvml.read(1, sysfs=sysfs).gpus
    assert gpu.numa_node == 3
    assert gpu.cpus == (*range(48, 64), *range(112, 128))


def test_locality_is_read_from_nvml_without_sysfs(fake_nvml: FakeNvml, make_tree: MakeTree) -> None:
    sysfs = make_tree({"bus/pci/devices/0000:18:00.0/numa_node": "-1\n"})
    first, second = fake_nvml.read(2, cpus="0-3;4-7", sysfs=sysfs).gpus
    assert (first.numa_node, first.cpus) == (0, (0, 1, 2, 3))
    assert (second.numa_node, second.cpus) == (1, (4, 5, 6, 7))


@pytest.mark.parametrize("when", ["lost", "lost_later"])
def test_a_lost_gpu_is_noted_and_the_others_keep_their_numbers(fake_nvml: FakeNvml, when: str) -> None:
    ailment: Any = {when: 2}
    hardware = fake_nvml.read(4, **ailment)
    assert [gpu.index for gpu in hardware.gpus] == [0, 1, 3]
    assert hardware.notes == ("NVIDIA GPU 2 could not be read and is left out: GPU is lost.",)


def test_what_a_gpu_does_not_support_is_unknown(fake_nvml: FakeNvml) -> None:
    _, gpu = fake_nvml.read(2, unsupported=1, busy=[(1, os.getpid(), 10)], processes=True).gpus
    assert gpu.name == H100
    assert (gpu.memory_total, gpu.memory_used, gpu.numa_node) == (None, None, None)
    assert gpu.cpus == ()
    assert gpu.mig == ()
    assert gpu.processes == ()


@pytest.mark.parametrize(
    ("error", "words", "remedy"),
    [
        (DRIVER_NOT_LOADED, "Driver Not Loaded", "modprobe nvidia"),
        (LIBRARY_MISMATCH, "version mismatch", "reboot"),
        (NO_PERMISSION, "Insufficient Permissions", "/dev/nvidiactl"),
        (999, "Unknown Error", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_one_note(fake_nvml: FakeNvml, error: int, words: str, remedy: str) -> None:
    hardware = fake_nvml.read(4, init_error=error)
    assert hardware.gpus == ()
    (note,) = hardware.notes
    assert words in note
    assert remedy in note


@pytest.mark.parametrize(
    ("error", "failed"), [(DRIVER_NOT_LOADED, True), (LIBRARY_MISMATCH, True), (NO_PERMISSION, False)]
)
def test_device_files_of_a_driver_that_does_not_answer(
    fake_nvml: FakeNvml, tmp_path: Path, error: int, failed: bool
) -> None:
    (tmp_path / "nvidia0").touch()
    hardware = fake_nvml.read(4, init_error=error, dev=tmp_path)
    assert hardware.gpu_evidence == (f"{tmp_path}/nvidia0 is there" if failed else None)
    assert len(hardware.notes) == 1


def test_gpus_that_are_all_lost(fake_nvml: FakeNvml) -> None:
    assert fake_nvml.read(1, lost=0).gpu_evidence == "The NVIDIA driver lists GPUs"


def test_device_files_without_the_library_prove_no_gpu(tmp_path: Path) -> None:
    """A privileged container has the device files of its host."""
    (tmp_path / "nvidia0").touch()
    assert read_in(clean_environ(), dev=tmp_path).gpu_evidence is None


def test_mig_instances(fake_nvml: FakeNvml) -> None:
    hardware = fake_nvml.read(2, mig={1: 2}, memory_mb=80_000)
    plain, sliced = hardware.gpus
    assert plain.mig == ()
    assert [mig.uuid for mig in sliced.mig] == [f"MIG-010{place}0000-0000-0000-0000-000000000000" for place in (0, 1)]
    assert sliced.mig[0].name == "MIG 1g.10gb"
    assert sliced.mig[0].memory_total == 10_000 * MIB
    assert [(mig.gpu_instance, mig.compute_instance) for mig in sliced.mig] == [(1, 0), (2, 0)]
    assert hardware.notes == ()


def test_compute_instances_of_one_gpu_instance(fake_nvml: FakeNvml) -> None:
    (gpu,) = fake_nvml.read(1, mig={0: 2}, mig_split=2).gpus
    assert [(mig.gpu_instance, mig.compute_instance) for mig in gpu.mig] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_mig_mode_without_instances_is_noted(fake_nvml: FakeNvml) -> None:
    hardware = fake_nvml.read(2, mig={1: 0})
    assert hardware.notes == ("NVIDIA GPU 1 is in MIG mode but has no instances, so CUDA cannot use it.",)


def test_processes_only_on_request(fake_nvml: FakeNvml) -> None:
    busy = [(1, os.getpid(), 512), (1, NO_PROCESS, 1)]
    assert fake_nvml.read(2, busy=busy).gpus[1].processes == ()
    idle, used = fake_nvml.read(2, busy=busy, processes=True).gpus
    assert idle.processes == ()
    ours, gone = used.processes
    assert (ours.pid, ours.user, ours.memory) == (os.getpid(), getpass.getuser(), 512 * MIB)
    assert ours.name
    assert (gone.pid, gone.name, gone.user, gone.memory) == (NO_PROCESS, None, None, MIB)


def test_nvml_is_shut_down_again(fake_nvml: FakeNvml) -> None:
    code = """
from ddplaunch.system.devices import read_hardware
import pynvml
assert len(read_hardware().gpus) == 4
try:
    pynvml.nvmlDeviceGetCount()
except pynvml.NVMLError_Uninitialized:
    print("shut down")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=fake_nvml.environ(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "shut down\n", result.stderr


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", refuse)


@pytest.mark.usefixtures("no_library")
def test_a_machine_without_nvidia_pays_for_no_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert read_nvidia(KernelTrees(tmp_path)) == ([], [])
    assert "pynvml" not in sys.modules


@pytest.mark.usefixtures("no_library")
def test_a_loaded_driver_whose_library_is_out_of_reach_is_noted(make_tree: MakeTree) -> None:
    gpus, (note,) = read_nvidia(KernelTrees(make_tree({"module/nvidia/version": "570.86.15\n"})))
    assert gpus == []
    assert "libnvidia-ml.so.1 cannot be loaded" in note
    assert "--gpus all" in note


def test_a_broken_library_is_noted(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # as a container image without the driver mounted may have it
    hardware = read_in({**clean_environ(), "LD_LIBRARY_PATH": str(tmp_path)})
    assert hardware.gpus == ()
    (note,) = hardware.notes
    assert "file too short" in note


def test_a_failing_reader_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    import ddplaunch.system.devices

    def fail(trees: KernelTrees) -> tuple[list[Gpu], list[str]]:
        raise RuntimeError("made up")

    broken = replace(ddplaunch.system.devices.NVIDIA, read=fail)
    monkeypatch.setattr(ddplaunch.system.devices, "VENDORS", (broken, *ddplaunch.system.devices.VENDORS[1:]))
    hardware = ddplaunch.system.devices.read_hardware()
    assert hardware.cpu.logical >= 1
    assert "NVIDIA GPUs could not be read: RuntimeError: made up." in hardware.notes
