"""Lightning's Trainer with DDP on CPUs: `lightning_trainer.py DEVICES`."""

import json
import os
import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        x, y = batch
        self.seen += x.flatten().tolist()
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def main(devices: int = 2):
    before = rank_zero_only.rank
    L.seed_everything(7)
    x = torch.arange(16.0).reshape(16, 1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, loader)
    report = {
        "rank": trainer.global_rank,
        "rank before": before,
        "local_rank": trainer.local_rank,
        "world_size": trainer.world_size,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "children": children(),
        "seen": model.seen,
        "loss": trainer.callback_metrics["loss"].item(),
        "weight": model.layer.weight.item(),
    }
    print(json.dumps(report), flush=True)
    if torch.distributed.is_initialized():  # gloo's threads may abort a process that ends with a group
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
