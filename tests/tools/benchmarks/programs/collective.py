"""The smallest rank: imports torch, joins the process group, one all_reduce, leaves."""

import os

import marks
import torch
import torch.distributed as dist

marks.mark("torch")


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.ones(4) * (rank + 1)
    dist.all_reduce(numbers)
    assert numbers[0].item() == world * (world + 1) / 2
    marks.mark("collective")
    if rank == int(os.environ.get("BENCH_ABSENT", rank)):
        marks.hold()
    else:  # the others wait for the absent one, inside torch
        marks.mark("held")
        dist.all_reduce(numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
