"""Checks of the start: how long until the first collective on the GPU, and what memory is held before it."""

import json
import re
import sys
import time
from pathlib import Path

from tests.conftest import read_events, run_command, torchrun_command, wait_until
from tests.gpu_check.harness import Machine, check

REDUCE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1 << 18, device=DEVICE)
dist.all_reduce(x)
assert x[0].item() == dist.get_world_size()
print("reduced at", time.time(), flush=True)
dist.destroy_process_group()
"""

TRAINER = """
import json, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        tokens = torch.arange(index, index + 8) % 40
        return {"input_ids": tokens, "labels": tokens}

config = GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    "out", max_steps=2, use_cpu=DEVICE == "cpu", ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Numbers())
trainer.train()
print("trained", trainer.state.global_step, flush=True)
del trainer
torch.distributed.destroy_process_group()
"""

NCCL = """
import os, torch, torch.distributed as dist
assert not torch.cuda.is_initialized(), "CUDA was initialized before the program"
dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
x = torch.full((1 << 20,), 3.0, device=DEVICE)
dist.all_reduce(x)
assert x[0].item() == 3 * dist.get_world_size()
print("reduced on", os.environ["DDPLAUNCH_DEVICE"], flush=True)
dist.destroy_process_group()
"""

IDLE = "import time, torch; print('idle', flush=True); time.sleep(600)\n"


def last_moment(output: str, ranks: int) -> float:
    found = re.findall(r"reduced at ([\d.]+)", output)
    assert len(found) == ranks, output[-500:]
    return max(map(float, found))


def measure(machine: Machine, ranks: int, *words: str) -> float:
    """Seconds from the command to the last rank's first collective."""
    began = time.time()
    output = machine.succeed("run", *words, "--nproc", str(ranks), machine.program("reduce.py", REDUCE), timeout=120)
    return last_moment(output, ranks) - began


def compare_start(machine: Machine, ranks: int) -> str:
    ours = measure(machine, ranks)
    began = time.time()
    command = torchrun_command(machine.folder, machine.folder / "reduce.py", nproc=ranks)
    done = run_command(command, machine.folder, machine.variables(), timeout=180)
    theirs = last_moment(done.stdout, ranks) - began
    text = f"{ours:.2f} s, torchrun {theirs:.2f} s"
    machine.begin_cuda(f"on CUDA tensors; on the CPU: {text}")
    return text


@check("start", 1)
def one_rank(machine: Machine) -> str:
    """1 rank to its first collective, against torchrun."""
    return compare_start(machine, 1)


@check("start", 1)
def four_ranks(machine: Machine) -> str:
    """4 ranks that share the GPU (gloo), against torchrun."""
    return compare_start(machine, 4)


@check("start", 1)
def eight_ranks(machine: Machine) -> str:
    """8 ranks that share the GPU (gloo), against torchrun."""
    return compare_start(machine, 8)


@check("start", 1)
def warm_start(machine: Machine) -> str:
    """A warm start of 4 ranks."""
    try:
        cold, warm = measure(machine, 4, "--warm"), measure(machine, 4, "--warm")
    finally:
        machine.run("warm", "--stop")
    text = f"{warm:.2f} s, first {cold:.2f} s"
    machine.begin_cuda(f"on CUDA tensors; on the CPU: {text}")
    return text


@check("start", 1)
def trainer(machine: Machine) -> str:
    """Hugging Face's Trainer, 2 ranks."""
    began = time.monotonic()
    output = machine.succeed("run", "--nproc", "2", machine.program("trainer.py", TRAINER), timeout=180)
    assert output.count("trained 2") == 2, output
    text = f"{time.monotonic() - began:.1f} s"
    machine.begin_cuda(f"on cuda:0; on the CPU: {text}")
    return text


@check("start", 1)
def memory_before(machine: Machine) -> str:
    """The zygote and idle ranks hold no memory of the GPU."""
    before = machine.gpu_memory()
    job = machine.start("run", "--nproc", "2", machine.program("idle.py", IDLE))
    job.wait_for("idle", 2)
    opened = [
        path.readlink().name
        for pid in (job.zygote(), *job.ranks())
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if path.exists()
    ]
    assert not [name for name in opened if re.fullmatch(r"nvidia\d+", name)], opened
    assert not machine.gpu_pids() & {job.zygote(), *job.ranks()}
    held = machine.gpu_memory() - before
    assert abs(held) < 8 << 20, held
    machine.begin_cuda("what NVML says of a real driver; no rank has opened a device file")
    return "0 MiB"


@check("start", 1)
def forked_nccl(machine: Machine) -> None:
    """A forked rank runs NCCL; CUDA was not initialized before the fork."""
    words = ("--start", "zygote", "--nproc", "1", "--log-dir", "logs")
    output = machine.succeed("run", *words, machine.program("nccl.py", NCCL))
    assert "reduced on cuda:0" in output, output
    (ready,) = read_events(machine.folder / "logs", "zygote_ready")
    assert ready["forks"], ready
    machine.begin_cuda("NCCL and CUDA in a fork")


@check("start", 1)
def executed_nccl(machine: Machine) -> None:
    """A rank that is a new interpreter runs NCCL."""
    machine.succeed("run", "--start", "exec", "--nproc", "1", machine.program("nccl.py", NCCL))
    machine.begin_cuda("NCCL")


@check("start", 1, quick=True)
def auto_ranks(machine: Machine) -> str:
    """One rank for each GPU, bound to the CPUs near it."""
    words = ("run", "--bind", "numa", machine.program("reduce.py", REDUCE), "--dry-run", "--json")
    plan = json.loads(machine.succeed(*words))
    assert [rank["device"] for rank in plan["ranks"]] == [f"cuda:{i}" for i in range(plan["world_size"])]
    assert all(rank["cpus"] for rank in plan["ranks"]), plan["ranks"]
    if not machine.is_simulated:
        count = run_command([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]).stdout
        assert plan["world_size"] == int(count)
    return f"{plan['world_size']} rank, CPUs {plan['ranks'][0]['cpus'][:3]}…"


@check("start", 1)
def backend_auto(machine: Machine) -> None:
    """--backend auto makes a group of NCCL."""
    program = machine.program("asks.py", "import torch.distributed as dist\nprint('backend', dist.get_backend())\n")
    if machine.is_simulated:
        plan = json.loads(machine.succeed("run", "--backend", "auto", "--nproc", "1", program, "--dry-run", "--json"))
        assert plan["backend"] == "nccl", plan["backend"]
    machine.begin_cuda("the group itself")
    assert "backend nccl" in machine.succeed("run", "--backend", "auto", "--nproc", "1", program)


def wait_for_users(machine: Machine, count: int) -> None:
    wait_until(lambda: len(machine.gpu_pids()) >= count, f"{count} processes on the GPU", 60)
