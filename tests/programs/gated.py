"""Data for docs/examples/template.py whose first run stops at its third step until it is preempted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from ddplaunch import runtime

PASSED = Path("passed")


class Gated(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(192, 1, 8, 8, generator=generator)
        self.y = self.x.flatten(1)[:, :10].argmax(1)
        self.given = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        if self.given == 130 and not PASSED.exists():
            print(f"rank {runtime.rank()} waits", flush=True)
            while not runtime.preempted():
                time.sleep(0.01)
            if runtime.is_main():
                PASSED.touch()
        return self.x[index], self.y[index]


def data() -> tuple[Dataset[Any], Dataset[Any]]:
    gated = Gated()
    return gated, TensorDataset(gated.x[:64], gated.y[:64])
