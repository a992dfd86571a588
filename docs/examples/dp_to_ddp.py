"""One model, one card, many cards, many machines: what is trained and saved under one way goes on under another.

    python docs/examples/dp_to_ddp.py --save model.pt                                      one card, or a CPU
    python docs/examples/dp_to_ddp.py --parallel dp --load model.pt --save model.pt        all cards, one process
    ddplaunch run docs/examples/dp_to_ddp.py --nproc 2 -- --parallel ddp --load model.pt   one process a card
    ddplaunch run --hosts n0,n1 docs/examples/dp_to_ddp.py -- --parallel ddp --load model.pt

All four take the same steps, as ``--batch-size`` is that of all cards together: only rounding differs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def inner(model: nn.Module) -> nn.Module:
    """The model that a wrapper wraps, whose parameters have the names that they have without it."""
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


def save(path: Path, model: nn.Module, wrapped: bool) -> None:
    """Write the parameters; ``wrapped`` as many a program does it, each name with the wrapper's "module." before it."""
    torch.save((model if wrapped else inner(model)).state_dict(), path)


def load(path: Path, model: nn.Module, device: torch.device) -> str:
    """Read what any of the ways has saved, with the prefix or without; return the first name in the file."""
    # map_location: it was saved from another rank's device, which may not exist here, or would fill up with all copies.
    state = torch.load(path, map_location=device, weights_only=True)
    first = next(iter(state))
    consume_prefix_in_state_dict_if_present(state, "module.")
    inner(model).load_state_dict(state)
    return first


def load_data() -> TensorDataset:
    """Return 512 of scikit-learn's 569 tumours, standardised: 30 measurements each, malignant or benign."""
    x, y = (torch.tensor(each)[:512] for each in load_breast_cancer(return_X_y=True))
    return TensorDataset(((x - x.mean(0)) / x.std(0)).float(), y)


def main(
    parallel: Literal["none", "dp", "ddp"] = "none",
    epochs: int = 3,
    batch_size: int = 64,
    load_from: Path | None = None,
    save_to: Path | None = None,
    wrapped: bool = False,
) -> None:
    """Train on batches of ``batch_size`` over all devices, from ``load_from`` on, and save to ``save_to``."""
    rank, world_size = 0, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if parallel == "ddp":
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # not RANK, which goes on on other machines
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    if load_from:
        first = load(load_from, model, device)  # before it is wrapped: a wrapper takes what it finds
        if rank == 0:
            print(f"loaded {load_from}, whose first name is {first}")
    if parallel == "dp":
        model = DataParallel(model)  # of all visible devices; without any it only passes on
    elif parallel == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    data = load_data()
    # DataParallel divides each batch; here each process loads its part of it.
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, world_size, rank)
    loader = DataLoader(data, batch_size // world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / world_size
        if parallel == "ddp":
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item():.4f}")

    if save_to and rank == 0:  # not local rank 0, of which each machine has one
        save(save_to, model, wrapped)
        print(f"saved {save_to}")
    if parallel == "ddp":
        dist.barrier()  # no rank leaves before the file is there
        del model, optimizer  # no DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13)
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--parallel", choices=["none", "dp", "ddp"])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--load", type=Path, dest="load_from")
    parser.add_argument("--save", type=Path, dest="save_to")
    parser.add_argument("--wrapped", action="store_true", help="save the wrapper, as programs do that forget about it")
    main(**vars(parser.parse_args()))
