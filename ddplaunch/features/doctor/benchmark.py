"""Benchmark process: measures matrix products on its device, and collectives together with other such processes.

It prints the facts about torch, then reads its device and tasks from stdin, a line of JSON each, and replies to each
with a line on stdout.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

from msgspec import Meta, Struct

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import Count, Name, NonNegativeFloat, Size, TaggedMessage, TextLine, parse
from ddplaunch.features.doctor.checks.torch import read_torch
from ddplaunch.features.doctor.probe import start_json_output

SIZES = (4, 1 << 20, 16 << 20)  # bytes; the first one measures latency
LARGE_SIZES = (64 << 20, 256 << 20, 1 << 30, 4 << 30)  # with --thorough, as far as memory and time allow
ALL_SIZES = SIZES + LARGE_SIZES
REPEATS_PER_SIZE = (30, 5, 3, 2, 2, 2, 2)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MAX_REPEAT_S = 1.5  # sizes that would take longer per repeat are skipped
TASK_TIMEOUT_S = 30.0  # for one task; then the caller kills this process
_MeasuredTime = Annotated[float, Meta(ge=1e-9, le=TASK_TIMEOUT_S)]
_MATRIX_SIZE = {"cpu": 512, "cuda": 4096}  # rows and columns
_MATMUL_TIME_S = 0.5  # of repeated products: on a busy machine the best of a few means little


class PrepareDevices(TaggedMessage, frozen=True):
    """Stop listening and start a benchmark process for each device. Reply: messages.PrepareReply.

    Each process gets this with only its own device.
    """

    devices: tuple[Name, ...]  # "cuda:0", "cpu"
    interface: Name  # for gloo; "" for gloo's own choice
    force_interface: bool = False  # override GLOO_SOCKET_IFNAME


class MeasureCollective(TaggedMessage, frozen=True):
    """Measure a collective with the first ``count`` devices of a node. Reply: CollectiveTimes.

    Each process gets this with its own rank as ``first``.
    """

    address: Name  # of the first rank; "" for a collective on this node alone
    port: Count
    first: Count  # the rank of the first device
    count: Count
    world_size: Count
    name: Name = "all_reduce"  # of COLLECTIVES
    max_tensor_bytes: Size = SIZES[-1]  # of one tensor; GPU memory limits it too


class DeviceThroughput(Struct, frozen=True):
    """A benchmark process's reply to PrepareDevices: its device, and the speed of matrix products on it."""

    device: Name  # "cuda:0", "cpu"
    flops: NonNegativeFloat  # per second, the best of all products


class CollectiveTimes(TaggedMessage, frozen=True):
    """Reply to MeasureCollective: the shortest time in seconds of each message size, in order, or the error."""

    seconds: Annotated[tuple[_MeasuredTime, ...], Meta(max_length=len(ALL_SIZES))] = ()
    error: TextLine | None = None


def main() -> None:
    """Run tasks until stdin ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    reply = start_json_output()
    reply(read_torch())
    request = parse(sys.stdin.readline(), PrepareDevices)
    (device,) = request.devices
    if request.interface and (request.force_interface or "GLOO_SOCKET_IFNAME" not in os.environ):
        os.environ["GLOO_SOCKET_IFNAME"] = request.interface
    reply(DeviceThroughput(device, _measure_matmul(device)))
    for line in sys.stdin:
        task = parse(line, MeasureCollective)
        try:
            reply(CollectiveTimes(tuple(_measure_collective(device, task))))
        except Exception as error:
            reply(CollectiveTimes(error=sanitize_line(str(error).partition("\n")[0], 200)))
    os._exit(0)


def _measure_matmul(device: str) -> float:
    import torch

    torch.set_num_threads(1)
    kind = device.partition(":")[0]
    side = _MATRIX_SIZE[kind]
    matrix: Any = torch.ones(side, side, device=device, dtype=torch.bfloat16 if kind == "cuda" else torch.float32)
    best, end = float("inf"), time.perf_counter() + _MATMUL_TIME_S
    while time.perf_counter() < end:
        _wait_for(device)
        began = time.perf_counter()
        matrix @ matrix
        _wait_for(device)
        best = min(best, time.perf_counter() - began)
    return float(2 * side**3 / best)


def _wait_for(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _measure_collective(device: str, task: MeasureCollective) -> list[float]:
    """Return the shortest time of each size; all ranks of the task measure the same sizes."""
    import torch

    dist = torch.distributed

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    address = f"[{task.address}]" if ":" in task.address else task.address
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{address}:{task.port}",
        rank=task.first,
        world_size=task.world_size,
        timeout=timedelta(seconds=TASK_TIMEOUT_S / 2),
    )

    def reduce_over_ranks(value: float, how: Any) -> float:
        agreed: Any = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(agreed, op=how)
        return float(agreed.item())

    try:
        most = [task.max_tensor_bytes, *([torch.cuda.mem_get_info(device)[0] // 4] if cuda else [])]
        max_bytes = reduce_over_ranks(min(most), dist.ReduceOp.MIN)
        best_times: list[float] = []
        for size, repeats in zip(ALL_SIZES, REPEATS_PER_SIZE, strict=True):
            expected = best_times[-1] * size / max(ALL_SIZES[len(best_times) - 1], 1 << 16) if best_times else 0.0
            if size > max_bytes or expected > MAX_REPEAT_S:
                break
            operate = _make_operation(task.name, size, task.world_size, device)
            operate()  # the first call connects
            times = []
            for _ in range(repeats):
                _wait_for(device)
                began = time.perf_counter()
                operate()
                _wait_for(device)
                times.append(time.perf_counter() - began)
            best_times.append(reduce_over_ranks(min(times), dist.ReduceOp.MAX))  # so that all ranks continue, or none
        return best_times
    finally:
        dist.destroy_process_group()


def _make_operation(name: str, size: int, world_size: int, device: str) -> Callable[[], object]:
    """Return a function that runs a collective; ``size``: bytes of the tensor with all ranks' parts."""
    import torch

    dist = torch.distributed

    names: Any = vars(dist)  # newer versions of torch have other names
    gather = names.get("all_gather_single") or dist.all_gather_into_tensor
    scatter = names.get("reduce_scatter_single") or dist.reduce_scatter_tensor
    part: Any = torch.ones(max(1, size // 4 // world_size), device=device)
    full: Any = part.repeat(world_size) if name != "all_reduce" else torch.ones(size // 4, device=device)
    match name:
        case "all_gather":
            return lambda: gather(full, part)
        case "reduce_scatter":
            return lambda: scatter(part, full)
        case "all_to_all":
            other: Any = torch.empty_like(full)
            return lambda: dist.all_to_all_single(other, full)
    return lambda: dist.all_reduce(full)
