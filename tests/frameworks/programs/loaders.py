"""webdataset and torchdata: prints the samples that this rank gets; `loaders.py SHARDS`."""

import json
import os
import sys

import webdataset
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


def from_shards(pattern, workers):
    # Both splits are webdataset's own; the nodes are what RANK and WORLD_SIZE say, no process group is needed.
    dataset = webdataset.WebDataset(pattern, shardshuffle=False, nodesplitter=webdataset.split_by_node).decode()
    loader = webdataset.WebLoader(dataset.to_tuple("cls"), batch_size=None, num_workers=workers)
    return [number for (number,) in loader]


def from_sampler(rank, world_size, workers):
    sampler = DistributedSampler(range(20), world_size, rank, shuffle=False)
    loader = StatefulDataLoader(range(20), batch_size=2, sampler=sampler, num_workers=workers)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 4:
            break
    again = StatefulDataLoader(range(20), batch_size=2, sampler=sampler, num_workers=workers)
    again.load_state_dict(loader.state_dict())  # as after a restart
    return seen + [number for batch in again for number in batch.tolist()]


def main(pattern):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_workers = {
        str(workers): {
            "webdataset": from_shards(pattern, workers),
            "torchdata": from_sampler(rank, world_size, workers),
        }
        for workers in (0, 2)
    }
    print(json.dumps({"rank": rank, **by_workers}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
