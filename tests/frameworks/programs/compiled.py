"""torch.compile around DistributedDataParallel, with the C++ back end for CPUs."""

import gc
import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) * 2)


def train():
    torch.manual_seed(7)
    model = DistributedDataParallel(Net())
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.arange(16.0).reshape(4, 4) / 16 + dist.get_rank()
    eager = model(x).square().mean().item()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "eager": round(eager, 5),
        "losses": losses,
        "weight": round(model.module.first.weight.sum().item(), 5),
    }


def main():
    dist.init_process_group("gloo")
    print(json.dumps(train()), flush=True)
    torch._dynamo.reset()  # what it has compiled holds the DDP object, and none may outlive the group:
    gc.collect()  # dropped after it, it can hang (gloo, torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
