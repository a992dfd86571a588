"""Checks on a machine with a real NVIDIA GPU; run there: ``python -m tests.gpu_check``.

Not part of the test suite, whose machines have no GPU. Prints one line a check and exits with the number of failures.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import ddplaunch_command, read_events

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


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(ddplaunch_command(*words), cwd=cwd, capture_output=True, text=True, timeout=300)


def devices() -> dict[str, Any]:
    done = subprocess.run(ddplaunch_command("devices", "--json"), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def torch_says(expression: str) -> list[Any]:
    code = f"import json, torch; print(json.dumps({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def memory_used() -> list[int]:
    return [gpu["memory_used"] for gpu in devices()["gpus"]]


def detection_agrees_with_torch(folder: Path) -> None:
    """Number, order and names of the devices, seen by NVML and by CUDA."""
    ours = [gpu["name"] for gpu in devices()["gpus"]]
    theirs = torch_says("[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]")
    assert ours == theirs, (ours, theirs)
    total = torch_says("[torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]")
    for gpu, bytes_by_cuda in zip(devices()["gpus"], total, strict=True):
        assert abs(gpu["memory_total"] - bytes_by_cuda) < 0.05 * bytes_by_cuda, (gpu["memory_total"], bytes_by_cuda)


def auto_is_the_number_of_gpus(folder: Path) -> None:
    plan = json.loads(run("run", "rank.py", "--dry-run", "--json", cwd=folder).stdout)
    assert plan["world_size"] == torch_says("torch.cuda.device_count()"), plan["world_size"]
    assert [rank["device"] for rank in plan["ranks"]] == [f"cuda:{i}" for i in range(plan["world_size"])]


def forked_ranks_run_nccl(folder: Path) -> None:
    """The zygote is safe with a CUDA build of torch, and its forks initialise CUDA and NCCL."""
    done = run("run", "--start", "zygote", "--log-dir", "logs", "rank.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "reduced on cuda:0" in done.stdout, done.stdout
    (ready,) = read_events(folder / "logs", "ready")
    assert ready["forks"], ready


def executed_ranks_run_nccl(folder: Path) -> None:
    done = run("run", "--start", "exec", "rank.py", cwd=folder)
    assert done.returncode == 0, done.stderr


def backend_auto_is_nccl(folder: Path) -> None:
    (folder / "asks.py").write_text("import torch.distributed as dist; print('backend', dist.get_backend())")
    done = run("run", "--backend", "auto", "--nproc", "1", "asks.py", cwd=folder)
    assert "backend nccl" in done.stdout, done.stdout + done.stderr


def ranks_are_bound_to_the_cpus_beside(folder: Path) -> None:
    done = run("run", "--bind", "numa", "rank.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    plan = json.loads(run("run", "--bind", "numa", "rank.py", "--dry-run", "--json", cwd=folder).stdout)
    for rank in plan["ranks"]:
        assert re.search(rf"reduced on {rank['device']} {re.escape(str(rank['cpus']))}", done.stdout), done.stdout


def memory_is_free_after_kill(folder: Path) -> None:
    """kill -9 of the launcher: the ranks go, and with them what they held on the GPU."""
    before = memory_used()
    log = folder / "hold.out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ddplaunch_command("run", "--start", "zygote", "--nproc", "1", "hold.py"), cwd=folder, stdout=out
        )
    _until(lambda: "holding" in log.read_text(), 120)
    held = memory_used()[0] - before[0]
    assert held > 1 << 30, held
    process.send_signal(signal.SIGKILL)
    process.wait()
    _until(lambda: memory_used()[0] - before[0] < 64 << 20, 10)


def users_of_a_gpu_are_shown(folder: Path) -> None:
    log = folder / "users.out"
    with log.open("wb") as out:
        process = subprocess.Popen(ddplaunch_command("run", "--nproc", "1", "hold.py"), cwd=folder, stdout=out)
    try:
        _until(lambda: "holding" in log.read_text(), 120)
        assert devices()["gpus"][0]["processes"], "NVML names no process; in a container it may not"
    finally:
        process.terminate()
        process.wait()


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.05)


CHECKS = (
    detection_agrees_with_torch,
    auto_is_the_number_of_gpus,
    forked_ranks_run_nccl,
    executed_ranks_run_nccl,
    backend_auto_is_nccl,
    ranks_are_bound_to_the_cpus_beside,
    memory_is_free_after_kill,
    users_of_a_gpu_are_shown,
)


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    failures = 0
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "rank.py").write_text(RANK)
            (folder / "hold.py").write_text(HOLD)
            began = time.monotonic()
            try:
                check(folder)
                print(f"ok    {check.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
            except Exception as error:
                failures += 1
                print(f"FAIL  {check.__name__}: {type(error).__name__}: {error}", flush=True)
    sys.exit(failures)


if __name__ == "__main__":
    main()
