"""Tests of the rules of ``--check``, with made-up GPUs, memory and file systems."""

import os
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.features.check import machine_check
from ddplaunch.features.check.machine_check import MIB, run_check
from ddplaunch.system.plan.hardware import Gpu, GpuProcess
from tests.system.devices.test_visible import machine, sliced

GPU = Gpu("nvidia", 0, "H100", "GPU-0", memory_total=80 << 30, memory_used=1 << 30)
USED = replace(GPU, memory_used=(1 << 30) + 1)
IN_USE = "GPU 0: 1.0 GiB{} are in use after 0 s (--gpu-memory-timeout){}"


def problem_of(*words) -> str:
    kind, text, hint = next(step for step in run_check(0.0, *words) if step[0] in ("failed", "passed"))
    assert (kind, bool(text), bool(hint)) == (("failed", True, True) if text else ("passed", False, False))
    return text


@pytest.mark.parametrize(
    ("devices", "gpus", "problem"),
    [
        (["cuda:0"], [GPU, replace(USED, index=1, uuid="GPU-1")], ""),  # the second is not the job's
        (["cuda:0"], [replace(GPU, memory_used=None)], ""),
        (["cuda:0"], [sliced(USED, (1, 0))], ""),
        (["cuda:0"], [replace(USED, processes=(GpuProcess(7, "python", "ada", None),))],
         IN_USE.format(" of 80.0 GiB", ", by python 7 of ada")),
        (["cuda:0"], [replace(USED, memory_total=None)], IN_USE.format("", "")),
        (["cuda:0", "cuda:1"], [GPU], "cuda:1 cannot be found: The driver is old"),
    ],
)  # fmt: skip
def test_gpus_that_are_in_use_or_missing(monkeypatch, devices, gpus, problem):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine_check, "read_hardware", lambda processes: machine(gpus, "The driver is old.", "More."))
    assert problem_of(devices, {}) == problem


def size(blocks, free_mib):
    return {"statvfs": lambda path: SimpleNamespace(f_blocks=blocks, f_bavail=free_mib, f_frsize=MIB)}


def memory(available_mib):
    return {"apply_memory_limits": lambda *_: (None, available_mib and available_mib * MIB)}


@pytest.mark.parametrize(
    ("folders", "world", "problem"),
    [
        ({}, memory(None), ""),
        ({}, memory(256), ""),
        ({}, memory(255), "255 MiB of memory are available (256 MiB needed)"),
        ({}, size(99, 64), ""),
        ({}, size(99, 63), "63 MiB free in /dev/shm (64 MiB needed)"),
        ({}, size(0, 0), ""),  # some virtual file systems have no size
        ({}, {"statvfs": lambda path: os.stat("/none")}, ""),  # macOS has no /dev/shm
        ({}, {"statvfs": lambda path: os.stat("/dev/null/shm")}, "/dev/shm: Not a directory"),
        ({"the current folder (/sys)": "/sys"}, {}, ""),  # it may be read-only
        ({"the current folder (x)": "/none"}, {}, "cannot write to the current folder (x): No such file or directory"),
        ({"TMPDIR (/none)": "/none"}, {}, "cannot write to TMPDIR (/none): No such file or directory"),
    ],
)
def test_memory_and_file_systems(monkeypatch, folders, world, problem):
    for name, function in world.items():
        monkeypatch.setattr(os if name == "statvfs" else machine_check, name, function)
    assert problem_of([], folders) == problem
