"""Train a model that no rank could hold: FSDP2, and a checkpoint of which each rank writes its part.

A language model of bytes, on the half megabyte of English that Python itself brings: nothing is downloaded.

    ddplaunch run docs/examples/fsdp.py --nproc 2 -- --parallel ddp --memory 180   does not fit
    ddplaunch run docs/examples/fsdp.py --nproc 2 -- --memory 180 --checkpoint model
    ddplaunch run docs/examples/fsdp.py --nproc 4 -- --memory 180 --checkpoint model --steps 10

The third goes on where the second ended, with twice the ranks. It also runs under torchrun.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

LENGTH = 32  # bytes that the model sees at a time
BATCH = 8  # of all ranks together: so any number of ranks takes the same steps
M_MMAP_THRESHOLD = -3  # of malloc.h


class Model(nn.Module):
    """A transformer that guesses each next byte; ``each`` is done to every layer before the next is made."""

    def __init__(self, width: int, layers: int, each: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            each(nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0, batch_first=True, norm_first=True))
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss over these bytes, each guessed from those before it."""
        x, y = x[:, :-1], x[:, 1:]
        hidden = self.byte(x) + self.position(torch.arange(LENGTH, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def join_group() -> torch.device:
    """Join the process group that the launcher's variables describe; return the device of this rank."""
    # A group has one backend, so either every rank of this machine has a GPU or none uses one.
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return device


def limit_memory(device: torch.device, limit: int) -> None:
    """Have this rank fail where it takes over ``limit`` megabytes from here on, as on a smaller device."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit * 1e6 / torch.cuda.get_device_properties(device).total_memory)
    else:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # glibc: freed tensors go back to the system
        (used,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + limit * 1_000_000, resource.RLIM_INFINITY))


def make_model(parallel: str, width: int, layers: int, device: torch.device) -> nn.Module:
    """Make the model, the same on any number of ranks: a copy in each, or divided among them."""
    torch.manual_seed(0)
    if parallel == "ddp":
        with device:
            model = Model(width, layers, lambda layer: layer)
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Each layer is divided as soon as it is made, and is whole again only while it computes: one at a time.
    with device:
        model = Model(width, layers, lambda layer: fully_shard(layer, mesh=mesh))
    return fully_shard(model, mesh=mesh)  # what is in no layer: the embeddings and the head


def megabytes(tensors: Iterable[torch.Tensor | None]) -> float:
    """What this rank holds of these tensors."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum(each.numel() * each.element_size() for each in local) / 1e6


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint, 0 without any; .metadata is what is written last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's parts; the names are those of the plain model, under FSDP and under DDP."""
    parts = get_state_dict(model, optimizer)
    return {"model": parts[0], "optimizer": parts[1]}


def main(
    parallel: Literal["fsdp", "ddp"] = "fsdp",
    steps: int = 5,
    width: int = 320,
    layers: int = 8,
    memory: int | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train up to step ``steps``, from the newest checkpoint in that folder; ``memory`` is a limit in megabytes."""
    device = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if memory:
        limit_memory(device, memory)
    model = make_model(parallel, width, layers, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003)  # of what this rank holds
    done = newest(checkpoint) if checkpoint else 0
    if checkpoint and done:
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoint / str(done))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if rank == 0:
        size = sum(each.numel() for each in model.parameters()) * 4 / 1e6
        print(f"{world_size} ranks, {parallel}: rank 0 holds {megabytes(model.parameters()):.1f} MB of {size:.1f}")

    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    for step in range(done + 1, steps + 1):
        chosen = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[i : i + LENGTH + 1] for i in chosen[rank::world_size]])
        loss = model(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item():.4f}")
    if checkpoint and steps > done:
        dcp.save(states(model, optimizer), checkpoint_id=checkpoint / str(steps))
    if rank == 0 and steps > done:
        gradients = [each.grad for each in model.parameters()]
        moments = [each for values in optimizer.state.values() for each in values.values() if each.ndim]
        held = megabytes([*model.parameters(), *gradients, *moments])
        print(f"with gradients and AdamW's moments {held:.1f} MB of {size * 4:.1f}")
    dist.barrier()  # no rank leaves while another one still communicates
    del model, optimizer, loss  # no DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--parallel", choices=["fsdp", "ddp"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--checkpoint", type=Path)
    main(**vars(parser.parse_args()))
