"""torch.distributed.checkpoint: parameters sharded over the ranks, `checkpoint.py save|load FOLDER`."""

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(what: str, folder: str):
    dist.init_process_group("gloo")
    torch.manual_seed(7 if what == "save" else 8)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if what == "save":
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if what == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    moments = [optimizer.state[each]["exp_avg"] for each in model.parameters()]
    report = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "here": sum(each.to_local().numel() for each in model.parameters()),
        "weights": [
            round(number, 6) for each in model.parameters() for number in each.full_tensor().flatten().tolist()
        ],
        "moments": [round(number, 6) for each in moments for number in each.full_tensor().flatten().tolist()],
    }
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
