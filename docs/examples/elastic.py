"""Train on nodes that come and go, and end up where an undisturbed run ends.

The same on every node but for --node-rank, with a checkpoint that all of them see:

    ddplaunch run elastic.py --nnodes 2:3 --node-rank 0 --master-addr n0 --master-port 29500 -- --checkpoint /nfs/e.pt

It also runs on one node, under torchrun, and as `python elastic.py --checkpoint e.pt`, which is a world of one.
What is equal whatever happens on the way: the batches, their order and number, the learning rate, and so the parameters
but for rounding, as other ranks add gradients up differently. What is not: the time, and which steps are done twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = 24  # of all ranks together, however many (up to 24): so the learning rate stays the same, not scaled

stop_signals: list[int] = []
"""The SIGTERMs so far: the launcher sends one to every rank when it wants to start again with other nodes."""


class ElasticSampler(Sampler[list[int]]):
    """This rank's share of each whole batch of an epoch, from any position in it, for any number of ranks."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch, self.consumed = samples, 1, 0  # consumed by all ranks together in this epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for start in range(self.consumed, self.samples - BATCH + 1, BATCH):
            yield order[start : start + BATCH][dist.get_rank() :: dist.get_world_size()]


def join_group() -> torch.device:
    """Join the process group that the launcher's variables describe; return the device of this rank."""
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # plain python
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None, **alone)
    return device


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint that is there as a whole or not at all, even after a power cut."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def train(device: torch.device, model: nn.Module, data: TensorDataset, epochs: int, path: Path, every: int) -> bool:
    """Train up to the end of epoch ``epochs``, or until all ranks got SIGTERM; return whether it is the end."""
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 0
    who = f"{world_size} ranks, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticSampler(len(data))
    if path.exists():  # not after DDP(): the ranks first meet there, so no rank can write a newer one before
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.epoch, sampler.consumed = state["position"]
    if rank == 0:
        print(f"start: epoch {sampler.epoch}, sample {sampler.consumed} of {len(data)}, {who}")
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    for epoch in range(sampler.epoch, epochs + 1):
        sampler.epoch = epoch
        for x, y in DataLoader(data, batch_sampler=sampler):
            # DDP averages over ranks, whose shares may differ by one sample: this makes it the mean over the batch.
            loss = nn.functional.mse_loss(ddp(x.to(device)), y.to(device), reduction="sum") * world_size / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, sampler.consumed = steps + 1, sampler.consumed + BATCH
            # All ranks stop after the same step: the first one before which every rank had got SIGTERM. If one were
            # enough, others would leave before their own launcher stops them, which would count as a failure.
            totals = torch.stack([loss.detach() / world_size, torch.tensor(float(bool(stop_signals)), device=device)])
            dist.all_reduce(totals)
            stop = totals[1].item() == world_size
            finished = epoch == epochs and sampler.consumed + BATCH > len(data)
            if rank == 0 and (stop or finished or steps % every == 0):
                position = epoch, sampler.consumed
                save(path, {"position": position, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
                print(f"saved: epoch {epoch}, sample {sampler.consumed} of {len(data)}, {who}, loss {totals[0]:.5f}")
            if stop:
                return finished
        sampler.consumed = 0
    return True


def main(checkpoint: Path, epochs: int = 20, every: int = 10) -> None:
    """Train on 960 samples, write ``checkpoint`` after every ``every`` steps, and show the loss over all samples."""
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    sys.stdout.reconfigure(line_buffering=True)  # in a log too, what is printed is there when we are killed
    device = join_group()
    torch.manual_seed(0)  # the same data and parameters on all ranks
    x = torch.randn(960, 4)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(960, 1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    finished = train(device, model, TensorDataset(x, y), epochs, checkpoint, every)
    if finished and dist.get_rank() == 0:
        print(f"finished: loss {nn.functional.mse_loss(model(x.to(device)).detach(), y.to(device)).item():.5f}")
    dist.barrier()  # no rank leaves while another one still communicates
    # No DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13). Ours went with train().
    dist.destroy_process_group()
    if not finished:
        sys.exit(128 + signal.SIGTERM)  # not 0, which would say that the work is done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
