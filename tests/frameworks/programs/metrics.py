"""torchmetrics: each rank has a part of the predictions, and `compute` gives the result for all."""

import json
import os

import torch
import torch.distributed as dist
from torchmetrics import MetricCollection
from torchmetrics.aggregation import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def measure(scores, truth):
    quality = MetricCollection(
        {"accuracy": MulticlassAccuracy(num_classes=3, average="micro"), "f1": MulticlassF1Score(num_classes=3)}
    )
    mean, all_of_them = MeanMetric(), CatMetric()
    for score, answer in zip(scores, truth, strict=True):
        quality.update(score[None], answer[None])
        mean.update(score[0])
        all_of_them.update(answer)
    report = {name: round(value.item(), 6) for name, value in quality.compute().items()}
    report["mean"] = round(mean.compute().item(), 6)
    report["seen"] = sorted(all_of_them.compute().int().tolist())
    return report


def main():
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(50, 3, generator=generator)
    truth = torch.randint(3, (50,), generator=generator)
    alone = measure(scores, truth)  # without a group
    dist.init_process_group("gloo")
    # Ranks have different numbers of samples, so that a mean of means would be wrong.
    mine = torch.arange(50) < 10 if rank == 0 else torch.arange(50) >= 10
    together = measure(scores[mine], truth[mine])
    print(json.dumps({"rank": rank, "alone": alone, "together": together}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
