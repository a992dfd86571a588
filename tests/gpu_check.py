"""Checks on a machine with a real NVIDIA GPU, which all other tests hide: ``pytest tests/gpu_check.py``."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BackgroundJob, ddplaunch_command, read_events, run_command, wait_until, write_program

del os.environ["CUDA_VISIBLE_DEVICES"]  # with which conftest hides GPUs
pytestmark = pytest.mark.timeout(600)

RANK = """
import os, torch, torch.distributed as dist
assert not torch.cuda.is_initialized()
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
x = torch.full((1 << 20,), float(dist.get_rank() + 1), device="cuda")
dist.all_reduce(x)
n = dist.get_world_size()
assert x[0].item() == n * (n + 1) / 2
print("reduced on", os.environ["DDPLAUNCH_DEVICE"], sorted(os.sched_getaffinity(0)), flush=True)
dist.destroy_process_group()
"""

HOLD = """
import time, torch
x = torch.ones(1 << 28, device="cuda")  # 1 GiB
torch.cuda.synchronize()
print("holding", flush=True)
time.sleep(1000)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_program(tmp_path, "rank.py", RANK)
    return lambda *words: run_command(ddplaunch_command("run", *words), tmp_path, timeout=300)


@pytest.fixture
def holder(tmp_path: Path, start_ddplaunch: Callable[..., BackgroundJob]) -> Callable[..., BackgroundJob]:
    """Start a job whose only rank holds 1 GiB of a GPU."""

    def hold(*words: str) -> BackgroundJob:
        job = start_ddplaunch("run", *words, "--nproc", "1", write_program(tmp_path, "hold.py", HOLD))
        job.wait_for("holding", timeout=120)
        return job

    return hold


def list_gpus() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run_command(ddplaunch_command("devices", "--json")).stdout)["gpus"]
    return found


def ask_torch(expression: str) -> Any:
    code = f"import json, torch; print(json.dumps({expression}))"
    return json.loads(run_command([sys.executable, "-c", code]).stdout)


def test_detection_agrees_with_torch() -> None:
    """Number, order and names of the devices, seen by NVML and by CUDA."""
    gpus = list_gpus()
    each = "for i in range(torch.cuda.device_count())]"
    assert [gpu["name"] for gpu in gpus] == ask_torch(f"[torch.cuda.get_device_name(i) {each}")
    for gpu, total in zip(gpus, ask_torch(f"[torch.cuda.get_device_properties(i).total_memory {each}"), strict=True):
        assert gpu["memory_total"] == pytest.approx(total, rel=0.05)


def test_auto_is_the_number_of_gpus(run: Run) -> None:
    plan = json.loads(run("rank.py", "--dry-run", "--json").stdout)
    assert plan["world_size"] == ask_torch("torch.cuda.device_count()")
    assert [rank["device"] for rank in plan["ranks"]] == [f"cuda:{i}" for i in range(plan["world_size"])]


def test_forked_ranks_run_nccl(run: Run, tmp_path: Path) -> None:
    """The zygote is safe with a CUDA build of torch, and its forks initialise CUDA and NCCL."""
    done = run("--start", "zygote", "--log-dir", "logs", "rank.py")
    assert done.returncode == 0, done.stderr
    assert "reduced on cuda:0" in done.stdout
    (ready,) = read_events(tmp_path / "logs", "zygote_ready")
    assert ready["forks"], ready


def test_executed_ranks_run_nccl(run: Run) -> None:
    done = run("--start", "exec", "rank.py")
    assert done.returncode == 0, done.stderr


def test_backend_auto_is_nccl(run: Run, tmp_path: Path) -> None:
    write_program(tmp_path, "asks.py", "import torch.distributed as dist; print('backend', dist.get_backend())")
    done = run("--backend", "auto", "--nproc", "1", "asks.py")
    assert "backend nccl" in done.stdout, done.stderr


def test_ranks_are_bound_to_the_cpus_next_to_their_gpu(run: Run) -> None:
    done = run("--bind", "numa", "rank.py")
    assert done.returncode == 0, done.stderr
    for rank in json.loads(run("--bind", "numa", "rank.py", "--dry-run", "--json").stdout)["ranks"]:
        assert re.search(rf"reduced on {rank['device']} {re.escape(str(rank['cpus']))}", done.stdout), done.stdout


def test_memory_is_free_after_kill(holder: Callable[..., BackgroundJob]) -> None:
    """kill -9 of the launcher: the ranks go, and with them what they held on the GPU."""
    before = list_gpus()[0]["memory_used"]
    job = holder("--start", "zygote")
    assert list_gpus()[0]["memory_used"] - before > 1 << 30
    job.signal(signal.SIGKILL)
    wait_until(lambda: list_gpus()[0]["memory_used"] - before < 64 << 20, "free memory", timeout=10)


def test_users_of_a_gpu_are_shown(holder: Callable[..., BackgroundJob]) -> None:
    holder()
    assert list_gpus()[0]["processes"], "NVML names no process; in a container it may not"
