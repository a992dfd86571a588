"""Hangs of three ranks, selected by the first argument; the second is the folder for their inspections."""

import os
import sys

import asking
import data
import torch
import torch.distributed as dist

KIND = sys.argv[1]
RANK = int(os.environ["RANK"])


def step(size=6):
    dist.all_reduce(torch.ones(size))


def absent():
    if RANK == 2:
        data.load_batch()
    step()


def gil():
    if RANK == 2:
        data.hold()
    step()


def lock():
    if RANK == 2:
        data.lock()
    step()


def loader():
    if RANK == 2:
        data.loader()
    step()


def mismatch():
    if RANK == 2:
        dist.all_gather([torch.ones(6) for _ in range(3)], torch.ones(6))
    else:
        step()


def ran_longer():
    if RANK == 2:
        step()
    sys.exit(0)


def point_to_point():
    if RANK == 0:
        dist.send(torch.ones(3), 1)
    if RANK == 1:
        dist.recv(torch.ones(3), 0)
    step()
    if RANK == 1:
        dist.recv(torch.ones(3), 2)
    if RANK == 2:
        data.load_batch()
    step()


def subgroup():
    if RANK == 0:
        dist.all_reduce(torch.ones(2, 3), group=PAIR)
    if RANK == 1:
        data.load_batch()
    step()


def chain():
    if RANK == 0:
        dist.all_reduce(torch.ones(2, 3), group=PAIR)
    if RANK == 1:
        dist.all_reduce(torch.ones(2, 3), group=TAIL)
    data.load_batch()


def circle():
    if RANK == 0:
        dist.all_reduce(torch.ones(2, 3), group=PAIR)
    step()


def asynchronous():
    works = [dist.all_reduce(torch.ones(5), async_op=True)]
    if RANK == 2:
        data.load_batch()
    works += [dist.all_reduce(torch.ones(5), async_op=True), dist.barrier(async_op=True)]
    for work in works:
        work.wait()


def broadcast():
    if RANK == 2:
        data.load_batch()
    dist.broadcast(torch.ones(5), 0)
    step()


def ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for number in range(3):
        if RANK == 2 and number == 2:
            data.load_batch()
        model(torch.ones(4)).sum().backward()


def fsdp():
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model)
    for number in range(3):
        if RANK == 2 and number == 2:
            data.load_batch()
        model(torch.ones(4)).sum().backward()


def objects():
    if RANK == 2:
        data.load_batch()
    dist.all_gather_object([None] * 3, {"a": 1})


def coalesced():
    if RANK == 2:
        data.load_batch()
    dist.all_reduce_coalesced([torch.ones(2, size) for size in range(6)])


def monitored_barrier():
    if RANK == 2:
        data.load_batch()
    dist.monitored_barrier()


def no_init():
    raise AssertionError


if __name__ == "__main__":
    asking.begin(sys.argv[2], RANK)
    if KIND == "no_init" and RANK == 2:
        data.load_batch()
    dist.init_process_group("gloo")
    if KIND in ("subgroup", "chain", "circle"):
        PAIR = dist.new_group([0, 1], group_desc="pair")
        TAIL = dist.new_group([1, 2], group_desc="tail")
    for _ in range(4):
        step()
    globals()[KIND]()
