"""``python start_by_spawn.py N PROGRAM``: N ranks by torch.multiprocessing.spawn, as many scripts do."""

import os
import runpy
import socket
import sys

import torch.multiprocessing


def rank_main(rank: int, count: int, port: int, program: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen = probe.getsockname()[1]
    number = int(sys.argv[1])
    torch.multiprocessing.spawn(rank_main, args=(number, chosen, sys.argv[2]), nprocs=number)
