"""Reads processes by PID: name and user, for GPU processes; and CPU, memory and I/O of a process tree, from /proc."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from ddplaunch.system.devices.cgroups import read_counters
from ddplaunch.system.plan.hardware import GpuProcess
from ddplaunch.system.processes.proc_utils import list_children, read_proc_file, read_stat

MAX_PROCESSES = 256  # read at most, of one tree
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def describe_process(pid: int, memory: int | None) -> GpuProcess:
    """Return the process; its name and user are None if it is gone or hidden (by a container, ``hidepid``)."""
    psutil: Any = importlib.import_module("psutil")
    name = user = None
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
    return GpuProcess(pid, name, user, memory)


class ProcessUsage(Struct, frozen=True):
    """The CPU time, memory and I/O of one or several processes."""

    cpu: float = 0.0  # seconds, including children that have ended
    memory: int = 0  # bytes not backed by files: what the kernel would have to swap
    read: int = 0  # bytes from files, pipes and disks, without ``recv``; including children that have ended
    written: int = 0

    def add(self, other: ProcessUsage) -> ProcessUsage:
        return ProcessUsage(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def read_tree_usage(pid: int) -> ProcessUsage | None:
    """Return the resource usage of a process and its living descendants; None if the process has ended.

    Only the children of main threads are followed, which costs 50 µs a process: other threads start none in practice.
    """
    total = _read_usage(pid)
    if total is None:
        return None
    below = list_children(pid)
    for count, child in enumerate(below):
        if count == MAX_PROCESSES:
            break
        if used := _read_usage(child):
            total = total.add(used)
            below += list_children(child)
    return total


def _read_usage(pid: int) -> ProcessUsage | None:
    fields, pages = read_stat(pid), read_proc_file(pid, "statm").split()
    if not fields or not pages:
        return None
    resident, shared = int(pages[1]), int(pages[2])
    read, written, from_disk, to_disk = read_io(pid)
    cpu, memory = sum(map(int, fields[11:15])) / _TICK, (resident - shared) * _PAGE
    return ProcessUsage(cpu, memory, max(read, from_disk), max(written, to_disk))


def read_io(pid: int) -> tuple[int, int, int, int]:
    """Return the bytes that a process read and wrote, by system calls and from disks (proc_pid_io(5))."""
    values = read_counters(f"/proc/{pid}/io")
    return values.get("rchar", 0), values.get("wchar", 0), values.get("read_bytes", 0), values.get("write_bytes", 0)
