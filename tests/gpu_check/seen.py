"""Checks of what is shown of a GPU: devices, doctor, top, profiles, stacks, the debugger, the report."""

import json
import re
import sys

from tests.conftest import ddplaunch_command, run_command, wait_until
from tests.gpu_check.explained import wait_for_sentence
from tests.gpu_check.harness import Machine, check
from tests.terminal_emulator import TerminalEmulator

LOOP = """
import torch, time
x = torch.randn(512, 512, device=DEVICE)
print("looping", flush=True)

def multiply(x):
    for _ in range(100):
        x = torch.tanh(x @ x)
    return x.sum().item()

while True:
    multiply(x)
"""

WAITS = """
import time, torch
if DEVICE == "cpu":
    print("waiting", flush=True)
    time.sleep(600)
torch.cuda._sleep(1 << 50)
print("waiting", flush=True)
torch.cuda.synchronize()
"""

STOPS = """
import torch
x = torch.arange(3.0, device=DEVICE)
print("before", flush=True)
breakpoint()
print("after", flush=True)
"""

SHORT = "import torch\nx = torch.ones(1 << 20, device=DEVICE)\nprint('done', x.sum().item())\n"


@check("seen", 2, quick=True)
def devices(machine: Machine) -> str:
    """`devices`: number, order, names and memory are those of CUDA."""
    gpus = machine.list_gpus()
    assert gpus[0]["uuid"].startswith("GPU-")
    machine.begin_cuda(f"CUDA's list; NVML is simulated: {gpus[0]['name']}")
    code = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[each.name, each.total_memory] for each in found]))
"""
    found = json.loads(run_command([sys.executable, "-c", code]).stdout)
    assert [gpu["name"] for gpu in gpus] == [name for name, _ in found]
    for gpu, (_, total) in zip(gpus, found, strict=True):
        assert abs(gpu["memory_total"] - total) < 0.05 * total
    return str(gpus[0]["name"])


@check("seen", 2, quick=True)
def mig(machine: Machine) -> str:
    """MIG, simulated: instances in `devices`, `--gpus mig`, and what NCCL needs."""
    env = machine.nvml.environ(2, mig={1: 2})
    words = ("run", "--gpus", "mig", machine.program("x.py", ""), "--dry-run", "--json")
    plan = json.loads(machine.succeed(*words, env=env))
    (note,) = [each for each in plan["notes"] if "NCCL_MULTI_RANK_GPU_ENABLE=1" in each]
    assert plan["world_size"] == 2, plan
    return str(note)


@check("seen", 2)
def doctor(machine: Machine) -> str:
    """`doctor` reads the GPU and its health, and measures NCCL on it."""
    done = machine.run("doctor", "--json", timeout=150)
    found = json.loads(done.stdout)
    facts = found["nodes"][0]["facts"]
    assert len(facts["gpus"]) == 1, facts["gpus"]
    machine.begin_cuda("the measurements of the GPU")
    return "; ".join(f"{each['what']} {each['value']:.3g} {each['unit']}" for each in found.get("figures", ()))


@check("seen", 2)
def check_before_start(machine: Machine) -> None:
    """`--check` before an attempt."""
    program = machine.program("short.py", SHORT)
    machine.begin_cuda("the check of a GPU that works with torch")
    assert "done" in machine.succeed("run", "--check", "--nproc", "1", program, timeout=120)


@check("seen", 2)
def top(machine: Machine) -> str:
    """`top` shows load and memory of the GPU."""
    job = machine.start("run", "--nproc", "1", machine.program("loop.py", LOOP))
    job.wait_for("looping")
    env = {}
    if machine.is_simulated:
        env = {"FAKE_NVML_RATES": "87", "FAKE_NVML_BUSY": f"0:{job.ranks()[0]}:2048"}
    command = ddplaunch_command("top", str(job.process.pid))
    screen = TerminalEmulator(command, machine.folder, machine.variables(env), columns=120)
    try:
        rows = screen.until(lambda screen: re.search(r"GPU [1-9]\d* %.*GiB", "\n".join(screen.rows)))
        screen.type("q")
        assert screen.end() == 0
    finally:
        screen.close()
    found = [row for row in rows if "GPU" in row]
    machine.begin_cuda(f"the load of a kernel; simulated: {found[0]}")
    return found[0]


@check("seen", 2)
def users(machine: Machine) -> str:
    """`devices` names the processes on a GPU."""
    job = machine.start("run", "--nproc", "1", machine.program("loop.py", LOOP))
    job.wait_for("looping")
    (rank,) = job.ranks()
    env = {"FAKE_NVML_BUSY": f"0:{rank}:2048"} if machine.is_simulated else {}
    page = machine.succeed("devices", env=env)
    machine.begin_cuda("the driver's list of processes") if f" {rank} " in page and machine.is_simulated else None
    assert "used by" in page, "NVML names no process; in a container it may not"
    return str(re.findall(r"used by .*", page)[0])


@check("seen", 2)
def profile(machine: Machine) -> str:
    """`profile` samples the line that waits for the GPU."""
    job = machine.start("run", "--nproc", "1", machine.program("loop.py", LOOP))
    job.wait_for("looping")
    (machine.folder / "out").mkdir()
    page = machine.succeed("profile", str(job.process.pid), "--seconds", "2", "--output", "out", timeout=90)
    assert "loop.py" in page, page
    machine.begin_cuda("time in CUDA")
    return " ".join(page.split())[:160]


@check("seen", 2)
def profile_torch(machine: Machine) -> str:
    """`profile --torch` has the kernels."""
    job = machine.start("run", "--nproc", "1", machine.program("loop.py", LOOP))
    job.wait_for("looping")
    (machine.folder / "out").mkdir()
    machine.succeed("profile", str(job.process.pid), "--torch", "--seconds", "1", "--output", "out", timeout=120)
    texts = [path.read_text(errors="replace") for path in (machine.folder / "out").rglob("*.json")]
    assert any("aten::tanh" in text for text in texts)
    machine.begin_cuda("kernels in the trace; it has torch's operators")
    kernels = sum(text.count('"cat": "kernel"') for text in texts)
    assert kernels
    return f"{kernels} kernels"


@check("seen", 2)
def stacks(machine: Machine) -> str:
    """`stacks` of a rank in cudaStreamSynchronize."""
    job = machine.start("run", "--nproc", "1", "--grace", "5", machine.program("waits.py", WAITS))
    job.wait_for("waiting")
    line = 6 if machine.is_simulated else 1 + WAITS.count("\n")  # below that of DEVICE
    page = wait_for_sentence(machine, job, rf"rank 0: waits\.py:{line}[^\n]*")
    machine.begin_cuda(f"a wait in CUDA; a sleep: {page}")
    return page


@check("seen", 2)
def debug(machine: Machine) -> str:
    """`debug` shows a CUDA tensor."""
    job = machine.start("run", "--debug", "--run-id", "stops", "--nproc", "1", machine.program("stops.py", STOPS))
    job.wait_for("before")
    wait_until(lambda: "ddplaunch debug" in job.stderr(), "the breakpoint")
    done = run_command(
        ddplaunch_command("debug", "stops"), machine.folder, machine.variables(), input="p x\nc\n", timeout=60
    )
    assert "tensor([0., 1., 2." in done.stdout, done.stdout + done.stderr
    job.wait()
    machine.begin_cuda("a tensor on cuda:0; one of the CPU was shown")
    assert "device='cuda:0'" in done.stdout
    return str(re.findall(r"tensor\(.*\)", done.stdout)[0])


@check("seen", 2)
def report(machine: Machine) -> str:
    """`report` of a run on the GPU."""
    machine.succeed("run", "--run-id", "short", "--nproc", "1", machine.program("short.py", SHORT))
    found = json.loads(machine.succeed("report", "short", "--json"))
    assert found["code"] == 0, found
    machine.begin_cuda("the GPU's memory and load in it")
    return f"ended with {found['code']}"
