"""Checks of the end: seconds until no process is left, and the GPU's memory is free again."""

import os
import signal
from collections.abc import Callable

from tests.conftest import BackgroundJob, wait_until
from tests.gpu_check.harness import Machine, check, elapsed

BUSY = """
import torch, time
state = __import__("sys").argv[1]
if DEVICE == "cpu":
    held = torch.zeros(1 << 26)
elif state == "kernel":
    torch.cuda._sleep(1 << 50)
else:
    held = torch.zeros(int(torch.cuda.mem_get_info()[0] * 0.95), dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
print("busy", flush=True)
if DEVICE != "cpu" and state == "kernel":
    torch.cuda.synchronize()
while state == "kernel":
    pass
time.sleep(600)
"""

KILLS: dict[str, tuple[int, Callable[[BackgroundJob], int]]] = {
    "Ctrl-C": (signal.SIGINT, lambda job: job.process.pid),
    "SIGTERM": (signal.SIGTERM, lambda job: job.process.pid),
    "kill -9 of the launcher": (signal.SIGKILL, lambda job: job.process.pid),
    "kill -9 of the zygote": (signal.SIGKILL, lambda job: job.zygote()),
    "kill -9 of the rank": (signal.SIGKILL, lambda job: job.ranks()[0]),
}

STATES = {"kernel": "while a kernel runs", "memory": "while memory is full"}


def end_by(machine: Machine, what: str, state: str) -> str:
    number, find = KILLS[what]
    before = machine.gpu_memory()
    job = machine.start("run", "--nproc", "1", "--grace", "5", machine.program("busy.py", BUSY), state)
    job.wait_for("busy")
    pid = find(job)
    with elapsed() as took:
        os.kill(pid, number)
        job.wait()
        job.assert_nothing_left(30)
        wait_until(lambda: abs(machine.gpu_memory() - before) < 64 << 20, "free memory of the GPU", 30)
        assert not machine.gpu_pids()
    text = f"{took[0]:.1f} s"
    machine.begin_cuda(f"memory of a real GPU; processes and files were gone after {text}")
    return text


def add_check(what: str, state: str) -> None:
    def run(machine: Machine) -> str:
        return end_by(machine, what, state)

    run.__doc__ = f"{what} {STATES[state]}."
    check("end", 1, f"{what} {state}")(run)


for _state in STATES:
    for _what in KILLS:
        add_check(_what, _state)
