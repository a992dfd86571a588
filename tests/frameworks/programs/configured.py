"""A script with `@hydra.main`, whose configuration is conf/config.yaml."""

import json
import os

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    dist.init_process_group("gloo")
    weight = torch.ones(1)
    for _ in range(cfg.steps):
        gradient = weight * (dist.get_rank() + 1)
        dist.all_reduce(gradient)
        weight -= cfg.lr * gradient
    with open(os.path.join(HydraConfig.get().runtime.output_dir, f"rank{dist.get_rank()}.txt"), "w") as file:
        file.write(f"{weight.item():.4f}\n")
    report = {"rank": dist.get_rank(), "lr": cfg.lr, "weight": round(weight.item(), 4)}
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
