"""How busy NVIDIA's GPUs are, asked of their driver in a child with a deadline: a wedged driver hangs who asks it.

The child answers each byte on its stdin with one line of JSON, and ends with its stdin. Where there are no GPUs it ends
at once, and is not asked again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ddplaunch.devices.gpu_health import THROTTLE_REASONS
from ddplaunch.devices.nvidia import open_nvml
from ddplaunch.loop import EventLoop
from ddplaunch.wire.child import HelperProcess

QUERY_TIMEOUT_S = 2.0  # seconds in which the driver must answer; the first time it may have to be woken
_FIRST_QUERY_TIMEOUT_S = 10.0
_MAX_ANSWER = 1 << 16
_SERVE_STATEMENT = (
    "import sys; sys.path[:] = [each for each in sys.path if each] + sys.argv[1:]\n"
    "from ddplaunch.devices.gpu_usage import serve; serve()"
)
_THROTTLE_MASK = sum(THROTTLE_REASONS)  # of the reasons, those that mean trouble
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class GpuUsage(NamedTuple):
    """One GPU; None is not known."""

    gpu: int  # its index
    busy: int | None  # percent of the last second or so in which something ran
    memory_used: int | None  # bytes
    memory_total: int | None
    pids: tuple[int, ...] = ()  # who uses it, as the driver numbers processes
    power: float | None = None  # watts
    slowed: bool | None = None  # whether heat or the power supply holds its clocks down


def used_by_ranks(gpus: tuple[GpuUsage, ...] | None, pids: Collection[int]) -> tuple[GpuUsage, ...] | None:
    """The GPUs that processes use; all where the driver numbers processes otherwise, as in a container."""
    return tuple(gpu for gpu in gpus or () if not {*gpu.pids}.isdisjoint(pids)) or gpus


class GpuUsageQuery:
    """Asks whenever it is told to; ``usage`` is the last answer: none for no GPUs, None for no answer."""

    def __init__(self, loop: EventLoop, on_usage: Callable[[], None] = lambda: None) -> None:
        """Starts nothing yet; ``on_usage`` is called when ``usage`` may have changed."""
        self._loop, self._heard = loop, on_usage
        self._child: HelperProcess | None = None
        self._answer = b""
        self._answers = 0
        self._over = False
        self.usage: tuple[GpuUsage, ...] | None = ()

    def query(self) -> bool:
        """Ask how busy they are, unless the last question is still open; return whether ``on_usage`` will be called."""
        if self._over:
            return False
        if self._child and self._child.has_deadline:
            return True
        if self._child is None:
            command = [sys.executable, "-c", _SERVE_STATEMENT, _ROOT]
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
        """End the child; one that the driver holds ends when the driver lets it."""
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
        self._heard()

    def _on_failed(self, usage: tuple[GpuUsage, ...] | None = None) -> None:
        self.usage = usage
        self.close()
        self._heard()


def _parse_reply(answer: bytes) -> tuple[GpuUsage, ...] | None:
    try:
        return tuple(
            GpuUsage(gpu, busy, used, total, tuple(pids), *more)
            for gpu, busy, used, total, pids, *more in json.loads(answer)
        )
    except (ValueError, TypeError):
        return None


def serve() -> None:
    """Be the child."""
    nvml = open_nvml()
    while nvml and os.read(0, 1):
        os.write(1, json.dumps([_usage(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]).encode() + b"\n")


def _usage(nvml: Any, index: int) -> GpuUsage:
    def ask(question: Any) -> Any:
        try:
            return question(handle)
        except nvml.NVMLError:
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:  # it has fallen off its bus
        return GpuUsage(index, None, None, None)
    rates, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
    power, reasons = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return GpuUsage(
        index,
        rates.gpu if rates else None,
        memory.used if memory else None,
        memory.total if memory else None,
        tuple(process.pid for process in processes),
        None if power is None else power / 1000,
        None if reasons is None else bool(reasons & _THROTTLE_MASK),
    )
