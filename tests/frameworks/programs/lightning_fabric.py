"""Lightning Fabric: a training loop with Fabric for its distributed parts."""

import json

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    model = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.001))
    x = torch.arange(16.0).reshape(16, 1)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4))
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        seen += x.flatten().tolist()
    report = {
        "rank": fabric.global_rank,
        "world_size": fabric.world_size,
        "seen": seen,
        "loss": fabric.all_reduce(loss, reduce_op="mean").item(),
        "weights": fabric.all_gather(model.weight).flatten().tolist(),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
