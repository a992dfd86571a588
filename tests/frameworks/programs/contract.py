"""The variables that torch documents for torchrun's workers, and the functions that read them."""

import json
import os

import torch.distributed as dist

DOCUMENTED = (
    "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def main():
    documented = {name: os.environ[name] for name in DOCUMENTED}
    set_by_launcher = sorted(set(os.environ) - set(os.environ["SET_BEFORE"].split()))
    dist.init_process_group("gloo")
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, documented["RANK"])
    report = {
        "rank": dist.get_rank(),
        "documented": documented,
        "set": set_by_launcher,
        "elastic": dist.is_torchelastic_launched(),
        "node_local_rank": dist.get_node_local_rank(),
        "ranks": gathered,
    }
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
