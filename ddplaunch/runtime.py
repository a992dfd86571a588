"""What a training program may ask about where it runs.

It works without ddplaunch too: under torchrun, or whatever else sets torch's variables (RANK, LOCAL_RANK, WORLD_SIZE),
and as a world of one where nothing is set. Nothing is imported until it is needed, and nothing is initialised here.

    from ddplaunch import runtime

    if runtime.is_main():
        print(f"training on {runtime.world_size()} processes")
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch


def rank() -> int:
    """This process among all of the job, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among those of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is rank 0: the one that prints, and writes what is to be written once."""
    return rank() == 0


def device() -> torch.device:
    """What this process is to compute on: the device that ddplaunch gave it, else its GPU by local rank, else the CPU.

    It is not made the current one: ``torch.cuda.set_device(runtime.device())`` does that.
    """
    import torch

    if given := os.environ.get("DDPLAUNCH_DEVICE"):
        return torch.device(given)
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank() % count) if count else torch.device("cpu")


def preempted() -> bool:
    """Whether the scheduler wants the machines back soon, so that it is time for a checkpoint and the end.

    It costs a system call. Ranks may see it at different moments, so they agree before they act on it, as
    docs/preemption.md shows. A job of which any rank was told True ends with exit code 75, "the same may be tried
    again"; one whose ranks finish their work without asking has just finished. Without ddplaunch: always False.
    """
    path = os.environ.get("DDPLAUNCH_PREEMPTED_FILE")
    if not path or not os.path.exists(path):
        return False
    try:  # for the launcher, which tells a job that made room from one that was done
        os.close(os.open(f"{path}.seen", os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError:
        pass
    return True
