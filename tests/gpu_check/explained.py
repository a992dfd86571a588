"""Checks of what is said when CUDA fails, or hangs: the first line names the rank, the cause and the program's line."""

import json
import re
import sys

from tests.conftest import BackgroundJob, run_command, wait_until
from tests.gpu_check.harness import Machine, NeedsGpu, check, elapsed

OUT_OF_MEMORY = """
import torch
held = [torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)]
while True:
    held.append(torch.zeros_like(held[0]))  # full
"""

DEVICE_ASSERT = """
import torch
table = torch.zeros(4, device=DEVICE)
index = torch.tensor([9], device=DEVICE)
if DEVICE == "cpu":
    raise RuntimeError("CUDA error: device-side assert triggered")
print(table[index])  # bad
"""

ILLEGAL_ADDRESS = """
import torch
if DEVICE == "cpu":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
source = 'extern "C" __global__ void poke(long long *at) { at[1ll << 44] = 1; }'
kernel = torch.cuda._compile_kernel(source, "poke")
kernel((1, 1, 1), (1, 1, 1), (torch.zeros(1, dtype=torch.int64, device=DEVICE),))
torch.cuda.synchronize()  # bad
"""

NO_KERNEL_IMAGE = """
import ctypes, torch
if DEVICE == "cpu":
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
torch.zeros(1, device=DEVICE)
driver, nvrtc = ctypes.CDLL("libcuda.so.1"), torch.cuda._utils._get_nvrtc_library()
program, size = ctypes.c_void_p(), ctypes.c_size_t()
nvrtc.nvrtcCreateProgram(ctypes.byref(program), b'extern "C" __global__ void f() {}', b"f.cu", 0, None, None)
assert not nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_75"))
nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
cubin = ctypes.create_string_buffer(size.value)
nvrtc.nvrtcGetCUBIN(program, cubin)
code = driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), cubin)
name = ctypes.c_char_p()
driver.cuGetErrorName(code, ctypes.byref(name))
if code:
    raise RuntimeError(f"no kernel image is available for execution on the device: {name.value.decode()}")
"""

NO_CUDART = """
import ctypes
ctypes.CDLL("libcudart.so.0")  # as torch's import does with the one that it was built for
"""

HANG = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
x = torch.ones(6, device=DEVICE)
dist.all_reduce(x)
if dist.get_rank() == dist.get_world_size() - 1 and "late" in sys.argv:
    print("late", flush=True)
    time.sleep(600)  # late
if "endless" in sys.argv and DEVICE != "cpu":
    torch.cuda._sleep(1 << 50)
print("hangs", flush=True)
dist.all_reduce(x)
if DEVICE != "cpu":
    torch.cuda.synchronize()  # here
time.sleep(600 if "endless" in sys.argv else 0)  # here
"""


def fail(machine: Machine, text: str, *expected: str, options: tuple[str, ...] = ()) -> str:
    """Run a program of one rank that fails; its error and the report have all that is expected. Return the first line.

    The traceback of a single rank is its own.
    """
    done = machine.run("run", *options, "--nproc", "1", machine.program("fails.py", text), timeout=90)
    assert done.returncode not in (0, 2), done.stderr
    report = done.stderr[done.stderr.rindex("ddplaunch: rank 0 failed") :]
    for each in ("fails.py", *expected):
        assert each in done.stderr, done.stderr[-1500:]
    return report.splitlines()[0]


def fail_in_cuda(machine: Machine, text: str, error: str) -> str:
    """As :func:`fail`; where CUDA is simulated, the program raises the text of CUDA's error itself."""
    line = fail(machine, text, error)
    machine.begin_cuda(f"CUDA's own error; the same text from the CPU: {line}")
    return line


@check("explained", 2)
def out_of_memory(machine: Machine) -> str:
    """CUDA out of memory, with --oom-report."""
    if machine.is_simulated:
        done = machine.run("run", "--oom-report", "--nproc", "1", machine.program("full.py", OUT_OF_MEMORY))
        assert "--oom-report needs a torch for CUDA" in done.stderr, done.stderr
    machine.begin_cuda("the report; a torch for CPUs is refused before the start")
    return fail(machine, OUT_OF_MEMORY, "out of memory", "# full", options=("--oom-report",))


@check("explained", 2)
def device_assert(machine: Machine) -> str:
    """A device-side assert."""
    return fail_in_cuda(machine, DEVICE_ASSERT, "device-side assert")


@check("explained", 2)
def illegal_address(machine: Machine) -> str:
    """An illegal address in a kernel."""
    return fail_in_cuda(machine, ILLEGAL_ADDRESS, "illegal memory access")


@check("explained", 2)
def no_kernel_image(machine: Machine) -> str:
    """A kernel for another GPU (cudaErrorNoKernelImage)."""
    return fail_in_cuda(machine, NO_KERNEL_IMAGE, "no kernel image")


@check("explained", 2)
def no_cudart(machine: Machine) -> str:
    """A missing libcudart."""
    return fail(machine, NO_CUDART, "libcudart.so.0: cannot open shared object file")


def wait_for_sentence(machine: Machine, job: BackgroundJob, pattern: str) -> str:
    """Wait until ``ddplaunch stacks`` prints what the pattern describes; return it."""
    found: list[str] = []

    def is_said() -> bool:
        page = machine.run("stacks", str(job.process.pid)).stdout
        match = re.search(pattern, page, re.DOTALL)
        found[:] = [match[0] if match else page]
        return match is not None

    try:
        wait_until(is_said, pattern, 30)
    except (Exception, AssertionError):
        raise AssertionError(f"{pattern} is not in {found[0][-800:]}") from None
    return " ".join(found[0].split())


@check("explained", 2)
def nccl_hang(machine: Machine) -> str:
    """A hang in an NCCL collective that one of two ranks does not enter: RAS, dumps, the sentence."""
    words = ("--stall-timeout", "5", "--log-dir", "logs", "--run-id", "hang", "--nproc", "2", "--oversubscribe")
    program = machine.program("hang.py", HANG)
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # one GPU is shared: from NCCL 2.30 on
    done = machine.run("run", *words, program, "late", env=env, timeout=90)
    if "Duplicate GPU detected" in done.stderr:
        raise NeedsGpu("two GPUs, or NCCL 2.30 or later for two ranks on one")
    assert done.returncode == 124, done.stderr[-1500:]
    sentence = re.search(r"rank 1 did not enter all_reduce #2.*hang.py:\d+", done.stderr)
    assert sentence, done.stderr[-1500:]
    kept = sorted(path.name for path in (machine.folder / "logs" / "hang" / "stall").iterdir())
    assert [name for name in kept if name.startswith("rank_")], kept
    machine.begin_cuda(f"NCCL, its dumps for torchfrtrace and RAS; on gloo: {sentence[0]}, kept {', '.join(kept)}")
    analyzer = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(machine.folder / "logs/hang/stall"),
    ]
    assert run_command(analyzer).returncode == 0
    ras = re.search(r"NCCL's RAS service.*", done.stderr)
    return f"{sentence[0]}; {ras[0] if ras else 'RAS did not reply'}; {', '.join(kept)}"


@check("explained", 2)
def endless_kernel(machine: Machine) -> str:
    """A kernel that never ends: stacks name the line, stop ends the job."""
    job = machine.start("run", "--nproc", "1", "--grace", "5", machine.program("hang.py", HANG), "endless")
    job.wait_for("hangs")
    page = wait_for_sentence(machine, job, r"hang\.py:\d+ \([^)]*\)")
    with elapsed() as took:
        machine.succeed("stop", str(job.process.pid))
        job.wait()
        job.assert_nothing_left(30)
    text = f"{page}; ended after {took[0]:.1f} s"
    machine.begin_cuda(f"a kernel; a rank that sleeps: {text}")
    return text


@check("explained", 2, quick=True)
def lost_gpu(machine: Machine) -> str:
    """A GPU that is lost, simulated: the plan has the others, and a note."""
    env = machine.nvml.environ(4, lost=1)
    done = machine.run("run", machine.program("x.py", ""), "--dry-run", "--json", env=env)
    plan = json.loads(done.stdout)
    (note,) = [each for each in plan["notes"] if "GPU 1" in each]
    assert plan["world_size"] == 3, plan
    return str(note)


@check("explained", 2)
def xid(machine: Machine) -> str:
    """A lost GPU and memory errors in `doctor`, simulated: it names Xid and the reset."""
    env = machine.nvml.environ(4, lost=3, ailing="1:85:64:3:1")
    found = json.loads(machine.run("doctor", "--json", env=env, timeout=120).stdout)["findings"]
    (lost,) = [each for each in found if each["subject"].endswith("GPU 3")]
    ailing = [each["text"] for each in found if each["subject"].endswith("GPU 1")]
    assert "Xid" in lost["hint"], lost
    assert any("3 memory errors" in text for text in ailing), ailing
    return f"{lost['text']}; {lost['hint']}"
