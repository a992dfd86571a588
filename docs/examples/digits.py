"""Read handwritten digits with gloo, the ranks finding each other in any of torch's ways.

1,797 digits of 8 by 8 pixels come with scikit-learn; `--mnist FOLDER` takes MNIST's 70,000, of torchvision, instead.

    ddplaunch run docs/examples/digits.py --nproc 2
    ddplaunch run docs/examples/digits.py --nproc 2 -- --init-method tcp://127.0.0.1:29511
    ddplaunch run docs/examples/digits.py --nproc 2 -- --init-method file:///tmp/digits
    ddplaunch run --nproc 2 --init-method file:///tmp/digits docs/examples/digits.py

In the last, ddplaunch makes the group, before the first line of this file. It also runs under torchrun, and without any
launcher, each rank started by hand: `RANK=0 WORLD_SIZE=2 python digits.py --init-method tcp://10.0.0.1:29511`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def join_group(init_method: str) -> str:
    """Join the process group, unless the launcher has done so, and return how: ranks are variables, this is where to.

    env://             MASTER_ADDR and MASTER_PORT, two more variables, which every launcher sets
    tcp://host:port    the same typed: a port of rank 0's machine that is free and that the others reach
    file:///path       a file that all see and that is not there yet: remove what a killed run has left
    """
    if dist.is_initialized():
        return "the launcher"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    return init_method


def load_sklearn() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train on, and every fifth, held out."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def load_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return MNIST's two parts, downloaded to ``folder`` where they are not there: by one rank, the others wait."""
    from torchvision.datasets import MNIST

    if os.environ.get("LOCAL_RANK", "0") == "0":  # one on each machine, as each may have a disk of its own
        MNIST(folder, download=True)
    dist.barrier()
    parts = [MNIST(folder, train=train) for train in (True, False)]
    train, held_out = (TensorDataset(part.data[:, None].float() / 255, part.targets) for part in parts)
    return train, held_out


def main(init_method: str = "env://", epochs: int = 5, lr: float = 0.01, mnist: Path | None = None) -> None:
    """Train a small convolutional network, and test it on what was held out, each rank on its share."""
    joined_by = join_group(init_method)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # gloo reduces tensors of a GPU too; nccl does it faster.
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus) if gpus else torch.device("cpu")
    data, held_out = load_mnist(mnist) if mnist else load_sklearn()

    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(512, 10)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    if rank == 0:
        print(f"{world_size} ranks, joined by {joined_by}; {len(data)} digits to train on")
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / world_size
        dist.all_reduce(total)  # the mean of all ranks: one rank's alone is that of its share
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item():.4f}")

    # Not a DistributedSampler, which would count some digits twice to give every rank as many.
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in DataLoader(Subset(held_out, range(rank, len(held_out), world_size)), batch_size=256):
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"held out: {int(right)} of {len(held_out)} right, {right.item() / len(held_out):.3f}")
    dist.barrier()  # no rank leaves while another one still communicates
    del ddp  # none may outlive the group: dropped after it, it can hang (gloo, torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--init-method")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--mnist", type=Path)
    main(**vars(parser.parse_args()))
