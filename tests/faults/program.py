"""The training program of the fault matrix: four ranks that talk, compute silently, or are deaf to SIGTERM too.

usage: program.py talk|silent|deaf FOLDER. A file FOLDER/enough ends it with 0; FOLDER/rank3 holds an order for rank 3.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

PAUSE = 0.01
"""Seconds between two steps: a test machine has fewer cores than the job has ranks."""


def say(text: str) -> None:
    """Print a line in one piece: ranks may share a file."""
    os.write(1, f"{text}\n".encode())


def obey(order: str) -> None:
    """Do what lies in the file ``order``, once."""
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
    say("left a grandchild")


def main(mode: str, folder: str) -> None:
    """Train until there is ``enough``; rank 0 says now and then which step it has done, to show progress."""
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    say(f"under way: rank {rank}, attempt {attempt}, pid {os.getpid()}")
    said, step, enough = time.monotonic(), 0, os.path.join(folder, "enough")
    while True:
        done = torch.tensor([float(os.path.exists(enough))])
        if mode == "talk":
            dist.all_reduce(done)  # all ranks see the end in the same step
        else:
            torch.rand(64, 64) @ torch.rand(64, 64)
        if done:
            break
        obey(os.path.join(folder, f"rank{rank}"))
        step += 1
        if rank == 0 and time.monotonic() > said + 0.25:
            said = time.monotonic()
            say(f"step {step}")
        time.sleep(PAUSE)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
