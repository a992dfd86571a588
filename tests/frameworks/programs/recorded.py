"""A script whose main is decorated with torch's `@record`, and fails on rank 1."""

import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        raise ValueError("this batch is empty")
    dist.barrier()


if __name__ == "__main__":
    main()
