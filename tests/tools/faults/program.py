"""The training program of the fault matrix: four ranks that communicate, compute, or ignore SIGTERM.

usage: program.py talk|silent|deaf|stubborn FOLDER. A file FOLDER/enough ends it with 0; FOLDER/rank3 holds an order.
Only ranks that talk import torch: for the others the outcome is decided by the launchers alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PAUSE = 0.01
"""Seconds between two steps, as a test machine has fewer cores than the job has ranks."""

IGNORED = {"deaf": [signal.SIGTERM], "stubborn": [signal.SIGTERM, signal.SIGINT]}
"""The signals that ranks of a mode ignore."""


def print_line(text: str) -> None:
    """Print a line in one piece: ranks may share a file."""
    os.write(1, f"{text}\n".encode())


def execute_order(order: str) -> None:
    """Execute the order in a file, once."""
    try:
        with open(order) as file:
            what = file.read()
        os.unlink(order)
    except OSError:
        return
    if what == "exit":
        sys.exit(3)
    if what == "raise":
        raise ValueError("as ordered")
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=null, stdout=null, stderr=null)
    print_line("left a grandchild")


def join_group() -> Callable[[bool], bool]:
    """Join the process group; return a function that makes a step and returns, equally on all ranks, whether to end."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def step(enough: bool) -> bool:
        done = torch.tensor([float(enough)])
        dist.all_reduce(done)
        if done:
            dist.destroy_process_group()
        return bool(done)

    for _ in range(3):
        step(False)
    return step


def step_alone(enough: bool) -> bool:
    """Make a step without the other ranks."""
    sum(range(10_000))
    return enough


def main(mode: str, folder: str) -> None:
    """Train until the file "enough" exists; rank 0 prints its step every 0.1 s, to show progress."""
    for ignored in IGNORED.get(mode, ()):
        signal.signal(ignored, signal.SIG_IGN)
    step = join_group() if mode == "talk" else step_alone
    rank = int(os.environ["RANK"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print_line(f"under way: rank {rank}, attempt {attempt}, pid {os.getpid()}")
    printed_at, number, enough = time.monotonic(), 0, os.path.join(folder, "enough")
    while not step(os.path.exists(enough)):
        execute_order(os.path.join(folder, f"rank{rank}"))
        number += 1
        if rank == 0 and time.monotonic() > printed_at + 0.1:
            printed_at = time.monotonic()
            print_line(f"step {number}")
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
