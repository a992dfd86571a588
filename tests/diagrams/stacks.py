"""Draws docs/stacks.svg: ``ddplaunch stacks`` about a job of four ranks, three of which wait for one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import clean_environment, ddplaunch_command
from tests.diagrams.terminal import DOCS, drawing, lines

PICTURE = DOCS / "stacks.svg"
LABEL = "A terminal: ddplaunch stacks; three ranks wait in an all_reduce that rank 2 has not entered, and its line"

PROGRAM = """\
import time

import torch
import torch.distributed as dist


def load_batch(number):
    if number == 30 and rank == 2:
        time.sleep(1)
        print("the disk is slow", flush=True)
        time.sleep(600)
    return torch.ones(6)


def train():
    for number in range(100):
        batch = load_batch(number)
        dist.all_reduce(batch)


dist.init_process_group("gloo")
rank = dist.get_rank()
train()
"""


def picture(folder: Path) -> str:
    """Run the job in this folder until it stands still, ask it, and return the answer as a drawing."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    variables = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.Popen(
        ddplaunch_command("run", "--run-id", "night", "train.py", "--nproc", "4"),
        cwd=folder,
        env=clean_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "[2] the disk is slow\n"
            return drawing(folder, "stacks", LABEL, ("stacks", "night"), variables)
        finally:
            job.terminate()


def is_clear(drawn: str) -> bool:
    return "rank 2 has not entered it: load_batch at train.py:11" in "".join(lines(drawn))
