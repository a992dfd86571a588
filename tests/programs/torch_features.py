"""Uses torch and numpy as training scripts do; writes a JSON file for each rank: {feature: result}.

Rank 0 alone uses the features whose processes import torch anew; with the argument "fork", no rank does.
"""

import os
import random
import sys
import threading

import numpy
import torch
import torch.distributed as dist
from feature_results import write_results
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), float(index)), os.getpid()


def load(method, workers=1):
    loader = DataLoader(Numbers(), batch_size=4, num_workers=workers, multiprocessing_context=method)
    total, pids = 0.0, set()
    for batch, loaded_by in loader:
        total += float(batch.sum())
        pids.update(loaded_by.tolist())
    return [total, len(pids), os.getpid() in pids]


def double(tensor, queue):
    tensor *= 2
    queue.put(float(tensor.sum()))


def share(method):
    context = torch.multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    tensor = torch.ones(4).share_memory_()
    process = context.Process(target=double, args=(tensor, queue))
    process.start()
    received = queue.get()
    process.join()
    return [received, float(tensor.sum()), process.exitcode]


def compute():
    """Parallel regions of OpenMP and OpenBLAS: a process forked after either has run hangs in them."""
    one = torch.ones(600, 600)
    return [
        torch.get_num_threads(),
        float((one @ one).relu().sum()),
        float((numpy.ones((600, 600)) @ one.numpy()).sum()),
    ]


def compute_in_threads():
    results = []
    threads = [threading.Thread(target=lambda: results.append(compute()[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def learn():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    return model.weight.grad.tolist()[0][0]


def together():
    dist.init_process_group("gloo")
    number = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(number)
    dist.barrier()
    dist.destroy_process_group()
    return number.tolist()


FEATURES = {
    "random": random.random,
    "numpy": lambda: float(numpy.random.rand()),
    "numpy generator": lambda: float(numpy.random.default_rng().random()),
    "torch": lambda: [torch.initial_seed(), float(torch.rand(1))],
    "compute": compute,
    "threads": compute_in_threads,
    "learn": learn,
    "loader fork": lambda: load("fork", 2),
    "loader spawn": lambda: load("spawn"),
    "loader forkserver": lambda: load("forkserver"),
    **{f"share {method}": lambda method=method: share(method) for method in ("fork", "spawn")},
    "together": together,
}


if __name__ == "__main__":
    anew = () if os.environ["RANK"] == "0" and sys.argv[1:] != ["fork"] else ("spawn", "forkserver")
    write_results({name: feature for name, feature in FEATURES.items() if not name.endswith(anew)})
