"""Queries the usage of NVIDIA's GPUs in a helper process with a timeout: calls into a wedged driver never return.

The helper answers each byte on its stdin with one line of JSON, and exits when its stdin closes. Without GPUs it exits
at once, and is not started again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.system.devices.gpu_health import THROTTLE_REASONS
from ddplaunch.system.devices.nvidia import open_nvml, query_nvml
from ddplaunch.system.plan.launch_command import python_command

QUERY_TIMEOUT_S = 2.0
_FIRST_QUERY_TIMEOUT_S = 10.0  # the driver may have to wake up the GPUs
_MAX_ANSWER = 1 << 16
_SERVE_STATEMENT = "from ddplaunch.system.devices.gpu_usage import serve; serve()"
_THROTTLE_MASK = sum(THROTTLE_REASONS)  # the reasons that mean trouble


class GpuUsage(NamedTuple):
    """The usage of one GPU; None is unknown."""

    gpu: int  # its index
    busy: int | None  # percent of about the last second in which a kernel ran
    memory_used: int | None  # bytes
    memory_total: int | None
    pids: tuple[int, ...] = ()  # the processes on it, as the driver numbers them
    power: float | None = None  # watts
    slowed: bool | None = None  # whether heat or the power supply holds its clocks down


def gpus_used_by(gpus: tuple[GpuUsage, ...] | None, pids: Collection[int]) -> tuple[GpuUsage, ...] | None:
    """Return the GPUs that ``pids`` use; all GPUs if none is known to be used by ``pids``, as in a container."""
    return tuple(gpu for gpu in gpus or () if not {*gpu.pids}.isdisjoint(pids)) or gpus


class GpuUsageQuery:
    """Queries GPU usage in a helper process; ``usage``: the last result, () without GPUs, None if the query failed."""

    def __init__(self, loop: EventLoop, on_usage: Callable[[], None] = lambda: None) -> None:
        """Create the object without a helper process; ``on_usage`` is called when ``usage`` may have changed."""
        self._loop, self._on_usage = loop, on_usage
        self._child: HelperProcess | None = None
        self._answer = b""
        self._answers = 0
        self._over = False
        self.usage: tuple[GpuUsage, ...] | None = ()

    def query(self) -> bool:
        """Start a query, unless one is in progress; return whether ``on_usage`` will be called."""
        if self._over:
            return False
        if self._child and self._child.has_timeout:
            return True
        if self._child is None:
            command = python_command(sys.executable, _SERVE_STATEMENT)
            try:
                self._child = HelperProcess(
                    self._loop,
                    command,
                    self._on_output,
                    self._on_failed,
                    deadline=_FIRST_QUERY_TIMEOUT_S,
                    pipe_stdin=True,
                )
            except OSError:
                self._over = True
                return False
        else:
            self._child.set_deadline(QUERY_TIMEOUT_S)
        self._child.write(b"?")
        return True

    def close(self) -> None:
        """Kill the helper; one that hangs in the driver ends when the driver returns."""
        self._over = True
        if self._child:
            self._child.close()
            self._child = None

    def _on_output(self, data: bytes) -> None:
        assert self._child
        self._answer += data
        if not data or len(self._answer) > _MAX_ANSWER:
            return self._on_failed(() if self._answers == 0 and not data else None)
        if not self._answer.endswith(b"\n"):
            return
        answer, self._answer = self._answer, b""
        self._child.set_deadline(None)
        self._answers += 1
        self.usage = _parse_reply(answer)
        self._on_usage()

    def _on_failed(self, usage: tuple[GpuUsage, ...] | None = None) -> None:
        self.usage = usage
        self.close()
        self._on_usage()


def read_gpu_usage() -> tuple[GpuUsage, ...]:
    """Query all GPUs once, and wait for the answer; () without GPUs, or if the driver hangs."""
    loop, answered = EventLoop(), list[bool]()
    query = GpuUsageQuery(loop, lambda: answered.append(True))
    if query.query():
        while not answered:
            loop.run_once()
    query.close()
    return query.usage or ()


def _parse_reply(answer: bytes) -> tuple[GpuUsage, ...] | None:
    try:
        return tuple(
            GpuUsage(gpu, busy, used, total, tuple(pids), *more)
            for gpu, busy, used, total, pids, *more in json.loads(answer)
        )
    except (ValueError, TypeError):
        return None


def serve() -> None:
    """Run the helper process: answer queries on stdin until it closes."""
    nvml = open_nvml()
    while nvml and os.read(0, 1):
        os.write(1, json.dumps([_usage(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]).encode() + b"\n")


def _usage(nvml: Any, index: int) -> GpuUsage:
    query = partial(query_nvml, nvml)
    handle = query(nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # it has fallen off its bus
        return GpuUsage(index, None, None, None)
    rates, memory = query(nvml.nvmlDeviceGetUtilizationRates, handle), query(nvml.nvmlDeviceGetMemoryInfo, handle)
    processes = query(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    power = query(nvml.nvmlDeviceGetPowerUsage, handle)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return GpuUsage(
        index,
        rates.gpu if rates else None,
        memory.used if memory else None,
        memory.total if memory else None,
        tuple(process.pid for process in processes),
        None if power is None else power / 1000,
        None if reasons is None else bool(reasons & _THROTTLE_MASK),
    )
