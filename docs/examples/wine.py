"""Train a small network on the wine data, on any number of processes.

178 Italian wines, 13 measurements each, three growers: the data come with scikit-learn, nothing is downloaded.

    ddplaunch run docs/examples/wine.py --nproc 2
    ddplaunch run docs/examples/wine.py:main --nproc 2 -- --epochs 30 --lr 0.05

It also runs under torchrun, and as `python docs/examples/wine.py`, which is a world of one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def join_group() -> torch.device:
    """Join the process group that the launcher's variables describe; return the device of this rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # A group has one backend, so either every rank of this machine has a GPU or none uses one.
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if on_gpus else None)
    else:  # without a launcher: a group of one needs no address and no port
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training data and a quarter held out, standardised. The seed makes the split alike on all ranks."""
    wine = load_wine()
    split = train_test_split(wine.data, wine.target, test_size=0.25, stratify=wine.target, random_state=0)
    x_train, x_test = (torch.tensor(x, dtype=torch.float32) for x in split[:2])
    y_train, y_test = (torch.tensor(y) for y in split[2:])
    mean, std = x_train.mean(0), x_train.std(0)  # of the training data only: the test data stay unseen
    return TensorDataset((x_train - mean) / std, y_train), TensorDataset((x_test - mean) / std, y_test)


def save(path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that is there as a whole or not at all, whenever we may be killed."""
    partial = path.with_name(path.name + ".partial")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, path)


def all_equal(model: nn.Module) -> bool:
    """Whether every rank has the same parameters: a collective, so every rank must call it."""
    ours = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ours)
    return all(torch.equal(ours, theirs) for theirs in everyones)


def train(
    device: torch.device, data: TensorDataset, epochs: int, lr: float, batch_size: int, checkpoint: Path | None
) -> nn.Module:
    """Train up to epoch ``epochs``, from ``checkpoint`` where that file exists; return the model without DDP."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    done = 0
    # Every rank reads it, so every node must see the path. Not after DDP(): that is where the ranks first meet, so
    # before it no rank can have written a newer one. map_location: it was saved from rank 0's device, not from ours.
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if rank == 0:
        print(f"world of {world_size}, rank 0 on {device}" + (f", going on after epoch {done}" if done else ""))

    for epoch in range(done + 1, epochs + 1):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over all ranks here
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            if epoch % 10 == 0 or epoch == epochs:
                print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.4f}")
            if checkpoint is not None:
                save(checkpoint, epoch, model, optimizer)
    return model


def main(epochs: int = 30, lr: float = 0.02, batch_size: int = 8, checkpoint: Path | None = None) -> None:
    """Train, test on what was held out, and leave; ``batch_size`` is that of one rank."""
    device = join_group()
    data, held_out = load_data()
    model = train(device, data, epochs, lr, batch_size, checkpoint)
    equal = all_equal(model)
    if dist.get_rank() == 0:
        x, y = (tensor.to(device) for tensor in held_out.tensors)
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"parameters equal on all ranks: {'yes' if equal else 'NO'}")
        print(f"held-out accuracy: {accuracy:.3f}")
    dist.barrier()  # no rank leaves while another one still communicates
    # No DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13). Ours went with train().
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--checkpoint", type=Path)
    main(**vars(parser.parse_args()))
