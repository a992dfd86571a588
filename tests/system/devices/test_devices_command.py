"""Tests of the real ``ddplaunch devices``, with a fake NVML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from tests.conftest import Launch, ddplaunch_command, run_in_terminal
from tests.fake_nvml import DRIVER_NOT_LOADED, H100, ROOT, FakeNvml, without_gpus

GIB = 1 << 30
NO_PROCESS = 2**22 + 1  # PID_MAX_LIMIT of Linux and one

COLOUR = re.compile(r"\x1b\[[\d;]*m")


Answer = Callable[..., str]


@pytest.fixture
def say(run_in_fork: Launch) -> Answer:
    """What ``ddplaunch devices`` prints with these variables."""

    def run(environ: Mapping[str, str], *arguments: str) -> str:
        result = run_in_fork("devices", *arguments, env=environ)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_one_line_a_gpu_in_aligned_columns_in_a_pipe(say: Answer, fake_nvml: FakeNvml) -> None:
    text = say(fake_nvml.environ([H100, "NVIDIA T400", H100, H100]))
    first, *others = gpus = lines_of(text, "gpu ")
    assert re.fullmatch(
        rf"gpu 0  cuda:0  {H100}  0\.0 of 79\.6 GiB  numa 0  cpus [\d,-]+ +0000:10:00\.0  "
        r"GPU-fa4e0000-0000-0000-0000-000000000000",
        first,
    )
    assert len(others) == 3
    assert len({(line.index(" numa "), line.index("GPU-fa4e")) for line in gpus}) == 1
    assert "A job sees 4 GPUs (source: NVML).\n" in text
    assert text.startswith("cpu    ")
    assert "\x1b" not in text
    assert text.isascii()


def test_what_a_job_does_not_see_is_hidden(say: Answer, fake_nvml: FakeNvml) -> None:
    text = say({**fake_nvml.environ(4), "CUDA_VISIBLE_DEVICES": "2,0,9"})
    assert [line.split()[2] for line in lines_of(text, "gpu ")] == ["cuda:1", "hidden", "cuda:0", "hidden"]
    assert "A job sees 2 GPUs (source: CUDA_VISIBLE_DEVICES)." in text
    assert "note: CUDA_VISIBLE_DEVICES=2,0,9 is ignored from '9' on: this machine has 4 GPUs, 0 to 3.\n" in text


def test_gpus_in_use_are_shown_with_their_process(say: Answer, fake_nvml: FakeNvml) -> None:
    text = say(fake_nvml.environ(2, busy=[(1, os.getpid(), 2048), (1, NO_PROCESS, 5)]))
    idle, used = lines_of(text, "gpu ")
    assert "used by" not in idle
    name = re.escape(psutil.Process().name())  # pytest-xdist sets one with spaces
    assert re.search(rf"used by {name} {os.getpid()} \(\w+, 2\.0 GiB\), process {NO_PROCESS} \(5 MiB\)$", used)
    assert "2.0 of 79.6 GiB" in used


def test_mig_instances_have_lines_of_their_own(say: Answer, fake_nvml: FakeNvml) -> None:
    text = say(fake_nvml.environ(2, mig={0: 2}))
    assert "note: A job sees 2 MIG instances of GPU 0: NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 for that" in text
    gpus = [line.split()[1:3] for line in lines_of(text, "gpu ")]
    assert gpus == [["0", "MIG"], ["0:0", "cuda:0"], ["0:1", "cuda:1"], ["1", "cuda:2"]]


@pytest.mark.parametrize(("error", "notes"), [(0, 0), (DRIVER_NOT_LOADED, 1)])
def test_no_gpus(say: Answer, fake_nvml: FakeNvml, error: int, notes: int) -> None:
    text = say(fake_nvml.environ(4 * notes, init_error=error))
    assert lines_of(text, "gpu ") == []
    assert "No GPU found: jobs will run on CPUs.\n" in text
    assert ["Driver Not Loaded" in note for note in lines_of(text, "note: ")] == [True] * notes


def test_json(say: Answer, fake_nvml: FakeNvml) -> None:
    environ = fake_nvml.environ(2, busy=[(1, os.getpid(), 1024)], mig={0: 1}, memory_mb=81920)
    result = json.loads(say({**environ, "CUDA_VISIBLE_DEVICES": "1"}, "--json"))
    assert list(result) == ["cpu", "gpus", "visible", "notes"]
    assert " ".join(result["cpu"]) == "name logical physical allowed quota memory_total memory_available numa"
    sliced, used = result["gpus"]
    assert used == {
        "vendor": "nvidia",
        "index": 1,
        "device": "cuda:0",
        "name": H100,
        "uuid": "GPU-fa4e0000-0000-0000-0000-000000000001",
        "pci": "0000:18:00.0",
        "driver": "570.86.15",
        "mig_mode": False,
        "fabric": None,
        "memory_total": 80 * GIB,
        "memory_used": GIB + (1 << 20),
        "numa_node": used["numa_node"],
        "cpus": used["cpus"],
        "mig": [],
        "processes": [{**used["processes"][0], "pid": os.getpid(), "memory": GIB}],
    }
    assert list(used["processes"][0]) == ["pid", "name", "user", "memory"]
    assert sliced["device"] is None
    assert sliced["mig"] == [
        {
            "uuid": "MIG-00000000-0000-0000-0000-000000000000",
            "device": None,
            "name": "MIG 1g.10gb",
            "memory_total": 10 * GIB,
            "gpu_instance": 1,
            "compute_instance": 0,
        }
    ]
    assert result["visible"] == {
        "source": "CUDA_VISIBLE_DEVICES",
        "devices": [
            {"device": "cuda:0", "gpu": 1, "vendor": "nvidia", "token": "GPU-fa4e0000-0000-0000-0000-000000000001"}
        ],
    }
    assert result["notes"] == []


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_table_fits_its_terminal(fake_nvml: FakeNvml, tmp_path: Path, columns: int) -> None:
    environ = fake_nvml.environ(4, mig={1: 2}, busy=[(0, os.getpid(), 2048)])
    text = run_in_terminal(ddplaunch_command("devices"), tmp_path, environ, columns)
    plain = COLOUR.sub("", text)
    assert "\x1b[1;32mcuda:0" in text, "a terminal gets colours"
    assert all(len(line) <= columns for line in plain.splitlines())
    words = plain.split()
    assert {"GPU", "Device", "Name", "Memory", "cuda:0", "cuda:4", "1:1", "79.6"} <= set(words)
    assert str(os.getpid()) in words
    assert plain.count(H100) == 4, "names are not cut"
    assert ("PCI" in words) == (columns == 200), plain
    assert "MIG-0101" in plain, "enough of an instance's UUID for --gpus"


def test_what_a_job_does_not_see_is_dimmed(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    environ = {**fake_nvml.environ(2), "CUDA_VISIBLE_DEVICES": "1"}
    text = run_in_terminal(ddplaunch_command("devices"), tmp_path, environ)
    assert "\x1b[2mhidden" in text
    assert "\x1b[1;32mcuda:0" in text


@without_gpus
def test_table_without_gpus_and_with_a_note(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    environ = fake_nvml.environ(1, init_error=DRIVER_NOT_LOADED)
    text = COLOUR.sub("", run_in_terminal(ddplaunch_command("devices"), tmp_path, environ))
    assert "No GPU found: " in text
    assert "\n! The NVIDIA driver did not list its GPUs: Driver Not Loaded;" in text


def test_a_pipe_never_imports_rich_nor_torch(say: Answer, fake_nvml: FakeNvml, tmp_path: Path) -> None:
    code = (
        "import sys, click\n"
        "from ddplaunch.features.devices.command import devices\n"
        "devices(standalone_mode=False)\n"
        "print(sorted({'rich', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=fake_nvml.environ(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stderr == "[]\n"
