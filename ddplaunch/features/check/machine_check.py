"""The check of this machine: shared memory, disk space, memory, GPUs. It runs in a helper process, step by step."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from ddplaunch.base.text import format_size, join_names
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.cgroups import apply_memory_limits
from ddplaunch.system.devices.cpu import read_cpu
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import GPU_BUSY_BYTES, Gpu

Step = tuple[Literal["checking", "waiting", "failed", "passed"], str, str | None]

MIB = 1 << 20
MIN_SHM_BYTES = 64 * MIB  # a container's default: with less free, dead processes have left something there
MIN_DISK_BYTES = 50 * MIB
MIN_MEMORY_BYTES = 256 * MIB  # what importing torch takes
GPU_POLL_INTERVAL_S = 0.5  # between two checks of GPUs that are in use
CURRENT_DIR_TEXT = "the current folder"


def main() -> None:
    """Run in the helper process; arguments: seconds to wait for GPUs, torch's device names, folders by name."""
    out = os.dup(1)
    os.dup2(2, 1)
    timeout, devices, folders = json.loads(sys.argv[1])
    for step in run_check(timeout, devices, folders):
        os.write(out, json.dumps(step).encode() + b"\n")
        if step[0] in ("failed", "passed"):
            os._exit(0)


def run_check(timeout: float, devices: Sequence[str], folders: dict[str, str]) -> Iterator[Step]:
    """Run the check step by step; the last step is "passed", or "failed" with the problem and a hint."""
    yield "checking", "/dev/shm", None
    if problem := _check_free_space("/dev/shm", "/dev/shm", MIN_SHM_BYTES):
        yield "failed", problem, "remove what dead processes left there, or make it larger: docker run --shm-size 16g"
    for what, path in folders.items():
        yield "checking", f"the file system of {what}", None
        if problem := _check_writable(what, path):
            yield "failed", problem, "free some space, or choose another folder"
    cpu = read_cpu("/sys")
    _, available = apply_memory_limits(cpu.memory_total, cpu.memory_available)
    if available is not None and available < MIN_MEMORY_BYTES:
        problem = f"{format_size(available)} of memory are available ({format_size(MIN_MEMORY_BYTES)} needed)"
        yield "failed", problem, "stop processes that use much, or request more memory"
    if devices:
        yield from _wait_for_gpu_memory(timeout, devices)
    yield "passed", "", None


def _check_free_space(what: str, path: str, needed: int) -> str | None:
    """Return why a file system has too little free space; None if it has enough, or reports no size."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return None if error.errno == errno.ENOENT else f"{what}: {error.strerror}"
    free = stat.f_bavail * stat.f_frsize
    is_full = free < needed and stat.f_blocks
    return f"{format_size(free)} free in {what} ({format_size(needed)} needed)" if is_full else None


def _check_writable(what: str, path: str) -> str | None:
    """Return why a folder is not writable; None if it is. The current folder may be read-only, as in containers."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        if what.startswith(CURRENT_DIR_TEXT) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return None
        return f"cannot write to {what}: {error.strerror}"
    return _check_free_space(what, path, MIN_DISK_BYTES)


def _wait_for_gpu_memory(timeout: float, devices: Sequence[str]) -> Iterator[Step]:
    """Wait until no process uses memory of this job's GPUs, for ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while True:
        yield "checking", "the GPU driver", None
        hardware = read_hardware(processes=True)
        visible = visible_gpus(hardware, None, os.environ)
        visible_by_device = dict(zip(visible.devices, visible.gpus, strict=True))
        if missing := [device for device in devices if device not in visible_by_device]:
            why = f": {hardware.notes[0].rstrip('.')}" if hardware.notes else ""
            yield "failed", f"{join_names(missing)} cannot be found{why}", "see what `nvidia-smi` and dmesg report"
            return
        gpus = {
            each.gpu.index: each.gpu for each in (visible_by_device[device] for device in devices) if each.mig is None
        }
        busy = [gpu for gpu in gpus.values() if (gpu.memory_used or 0) > GPU_BUSY_BYTES]
        if not busy:
            return
        if time.monotonic() >= until:
            hint = "stop the processes that use it, or exclude the GPU: --gpus"
            yield "failed", _describe_gpu_users(busy[0], timeout), hint
            return
        used = (f"GPU {gpu.index}: {format_size(gpu.memory_used or 0)}" for gpu in busy)
        yield "waiting", f"{join_names(used)} are still in use", None
        time.sleep(max(0.0, min(GPU_POLL_INTERVAL_S, until - time.monotonic())))


def _describe_gpu_users(gpu: Gpu, waited: float) -> str:
    of = f" of {format_size(gpu.memory_total)}" if gpu.memory_total else ""
    users = join_names(each.description for each in gpu.processes)
    by = f", by {users}" if users else ""
    used = f"{format_size(gpu.memory_used or 0)}{of}"
    return f"GPU {gpu.index}: {used} are in use after {waited:g} s (--gpu-memory-timeout){by}"
