"""A rank that trains until it is released: DDP and AdamW, a mark from rank 0 after each block of steps."""

import os
import select
import time

import marks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BLOCK = 10


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(256, 256)
    released = select.poll()
    released.register(os.open(os.environ[marks.RELEASE], os.O_RDONLY | os.O_NONBLOCK), 0)
    over = torch.zeros(1)
    while not over:
        for _ in range(BLOCK):
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        over[0] = bool(released.poll(0))
        dist.broadcast(over, 0)
        if dist.get_rank() == 0:
            marks.mark("block")
    dist.barrier()
    time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
