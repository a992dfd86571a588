"""A training script to copy: what a run on one machine, on many and under Slurm needs, by command line alone.

    ddplaunch run template.py --nproc 4 -- --epochs 20
    ddplaunch run template.py --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- --batch-size 16
    ddplaunch submit --nodes 2 --gpus-per-node 8 --time 4:00:00 --requeue 10 template.py -- --checkpoint /nfs/run.pt

It also runs under torchrun, and as `python template.py`, which is a world of one. Started again, it goes on from its
checkpoint in the middle of an epoch, and ends with the same model as a run that nothing disturbed.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

from ddplaunch import runtime

CHECK_EVERY = 10  # steps between two looks whether the job must make room: all ranks have to agree, which takes time


# ------------------------------------------------------------------------------------- what to train, on what


def digits() -> tuple[Dataset[Any], Dataset[Any]]:
    """1797 handwritten digits of 8 x 8 pixels, which come with scikit-learn; a fifth of them is held out."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    data = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
    return TensorDataset(*(each[:1437] for each in data)), TensorDataset(*(each[1437:] for each in data))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="cnn", help="mlp, cnn, or MODULE:FUNCTION that returns one")
    parser.add_argument("--data", default="digits", help="digits, or MODULE:FUNCTION: two sets, to learn and to test")
    parser.add_argument("--loss", default="cross_entropy", help="a function of torch.nn.functional, or MODULE:FUNCTION")
    parser.add_argument("--epochs", type=int, default=10, help="passes through the data")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one rank at a time")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a rank that make one step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate at the start")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better loss before it ends early")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--workers", type=int, default=0, help="processes of a rank that load data")
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt", help="where all nodes see it")
    parser.add_argument("--reset", action="store_true", help="begin anew although there is a checkpoint")
    parser.add_argument("--tensorboard", metavar="DIR", help="write curves there")
    return parser.parse_args()


def find(name: str, offered: dict[str, Any]) -> Callable[..., Any]:
    """A function by its name among those offered, or as MODULE:FUNCTION anywhere."""
    module, colon, function = name.rpartition(":")
    return (vars(importlib.import_module(module)) if colon else offered)[function]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- what all ranks share


def join_group() -> torch.device:
    """Join the process group that the launcher's variables describe; return the device of this rank."""
    device = runtime.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # plain python
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def total(*numbers: float, device: torch.device) -> list[float]:
    """The sums over all ranks: every rank calls this, and every rank gets the same."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()  # type: ignore[no-any-return]


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint that is there as a whole or not at all, even after a power cut."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# ------------------------------------------------------------------------------------------------------- training


def train(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Train to the end, or until the job must make room; return the model without DDP."""
    torch.manual_seed(options.seed)
    learned, tested = find(options.data, globals())()
    model = find(options.model, globals())().to(device)
    criterion = find(options.loss, vars(nn.functional))
    sampler = DistributedSampler(learned, seed=options.seed)
    steps = len(sampler) // options.batch_size // options.accumulate  # of an epoch, which has another order each time
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * steps)
    at = {"epoch": 0, "step": 0, "best": float("inf"), "worse": 0}
    keeping = {"model": model, "optimizer": optimizer, "schedule": schedule}
    # Not after DDP(): that is where the ranks first meet, so before it none can have written a newer one.
    # map_location: it was saved from rank 0's device, which is not ours.
    if options.checkpoint.exists() and not options.reset:
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        at = state["at"]
        for name, part in keeping.items():
            part.load_state_dict(state[name])
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    writer = None
    if runtime.is_main():
        print(f"{runtime.world_size()} ranks, rank 0 on {device}, at epoch {at['epoch']} step {at['step']}", flush=True)
        if options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(options.tensorboard, purge_step=at["epoch"] * steps + at["step"])

    def keep() -> None:
        if runtime.is_main():
            save(options.checkpoint, {"at": at, **{name: part.state_dict() for name, part in keeping.items()}})

    while at["epoch"] < options.epochs and at["worse"] < options.patience:
        sampler.set_epoch(at["epoch"])  # without it every epoch has the same order
        batches = list(BatchSampler(sampler, options.batch_size, drop_last=True))[: steps * options.accumulate]
        left = batches[at["step"] * options.accumulate :]
        loader = iter(DataLoader(learned, batch_sampler=left, num_workers=options.workers))
        model.train()
        for step in runtime.progress(range(at["step"], steps), f"epoch {at['epoch'] + 1}"):
            # Every step of every rank has a seed of its own: ranks drop out differently, a resumed run like the first.
            number = at["epoch"] * steps + step
            torch.manual_seed((options.seed * 1_000_003 + number) * runtime.world_size() + runtime.rank())
            for part in range(options.accumulate):
                x, y = (each.to(device) for each in next(loader))
                # Gradients are averaged over the ranks once a step, in the last backward.
                with ddp.no_sync() if part < options.accumulate - 1 else nullcontext():
                    with torch.autocast(device.type, torch.bfloat16, enabled=options.amp):
                        loss = criterion(ddp(x), y) / options.accumulate
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            at["step"] = step + 1
            if writer:
                writer.add_scalar("loss", loss.item() * options.accumulate, number)
            if (number + 1) % CHECK_EVERY == 0 and sum(total(runtime.preempted(), device=device)):
                keep()
                if runtime.is_main():
                    print(f"made room at epoch {at['epoch']} step {at['step']}", flush=True)
                return model
        at["epoch"], at["step"] = at["epoch"] + 1, 0
        loss, right = evaluate(model, tested, criterion, device)
        at["worse"] = 0 if loss < at["best"] else at["worse"] + 1  # the same on all ranks, so all end together
        at["best"] = min(loss, at["best"])
        keep()
        if runtime.is_main():
            print(f"epoch {at['epoch']}: loss {loss:.4f}, {right:.1%} right", flush=True)
            if writer:
                writer.add_scalar("test loss", loss, at["epoch"] * steps)
    if runtime.is_main():
        print(f"finished: best loss {at['best']:.6f}", flush=True)
    return model


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Dataset[Any], criterion: Callable[..., Any], device: torch.device
) -> tuple[float, float]:
    """The mean loss on what was held out and the share of right answers; each rank takes a part, all get the same."""
    model.eval()
    loss = right = count = 0.0
    mine = range(runtime.rank(), len(data), runtime.world_size())  # type: ignore[arg-type] # none twice, none left out
    for x, y in DataLoader(data, 64, sampler=mine):
        out = model(x.to(device))
        loss += criterion(out, y.to(device)).item() * len(y)
        right += (out.argmax(1) == y.to(device)).sum().item()
        count += len(y)
    loss, right, count = total(loss, right, count, device=device)
    return loss / count, right / count


def main() -> None:
    device = join_group()
    train(arguments(), device)
    dist.barrier()  # no rank leaves while another one still communicates
    # No DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13). Ours went with train().
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
