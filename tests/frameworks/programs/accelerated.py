"""accelerate: gradients accumulated over two batches, and an evaluation whose last batch is not full."""

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(7)
    x = torch.arange(24.0).reshape(24, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    # A batch is what all processes see at once, so that any number of them takes the same steps.
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            updates += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()

    numbers = torch.arange(11.0).reshape(11, 1)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(numbers), batch_size=2))
    gathered = []
    with torch.no_grad():
        for (x,) in evaluation:
            gathered += accelerator.gather_for_metrics(x).flatten().tolist()
    report = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "kind": accelerator.distributed_type.value,
        "updates": updates,
        "weight": round(accelerator.unwrap_model(model).weight.item(), 5),
        "gathered": sorted(gathered),
    }
    print(json.dumps(report), flush=True)
    # No DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13).
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
