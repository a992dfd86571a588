"""Draws docs/failure.svg: a job of four ranks in a terminal, one of which fails, and the report.

The job is real, and so is the terminal; of what is shown only the folder's name is another.
"""

from __future__ import annotations

from pathlib import Path

from tests.diagrams.terminal import DOCS, drawing, lines

PICTURE = DOCS / "failure.svg"
LABEL = "A terminal: ddplaunch run train.py --nproc 4; rank 2 fails, and the report names it"
WORDS = ("run", "train.py", "--nproc", "4")

# The other ranks are at work when one fails, and not in a collective, whose error would race with their being stopped.
PROGRAM = """\
import time

import torch
import torch.distributed as dist


def check(batch):
    if batch == 30 and rank == 2:
        raise ValueError(f"batch {batch} has no labels")


dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} trains on shard {rank}", flush=True)
for batch in range(40):
    check(batch)
    time.sleep(2 if batch == 30 else 0)
    loss = torch.tensor(1 / (batch + 1))
    dist.all_reduce(loss)
    if rank == 0 and batch in (10, 20):
        print(f"batch {batch}: loss {loss / 4:.3f}", flush=True)
"""


def picture(folder: Path) -> str:
    """Run the job in this folder, and return what its terminal showed, as a drawing."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    return drawing(folder, "failure", LABEL, WORDS, {})


def is_clear(drawn: str) -> bool:
    """Whether the picture shows all lines: ranks that lose a peer before they are stopped print more."""
    return "3 other ranks were stopped" in lines(drawn)[-1]
