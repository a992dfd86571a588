"""A rank of a real training script: a model in DistributedDataParallel, AdamW, one step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    # gloo can deadlock in its teardown while the last work is being dropped (torch 2.13): all meet, then a moment.
    dist.barrier()
    time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
