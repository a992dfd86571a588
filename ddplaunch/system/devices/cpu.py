"""Reads the CPUs: name, count, affinity, cgroup quota, NUMA nodes, and the machine's memory."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from ddplaunch.system.devices.cgroups import list_cgroup_dirs, read_counters
from ddplaunch.system.devices.sysfs import Folder, read_numa, read_text
from ddplaunch.system.plan.hardware import Cpu
from ddplaunch.system.plan.numbers import parse_cpulist

FIRST_PROCESSOR = 4096
"""Bytes of /proc/cpuinfo that contain the first processor; some kernels take 10 ms to write all of a big machine's."""

MODEL_NAME = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
"""In /proc/cpuinfo of x86: "model name	: AMD EPYC 9654 96-Core Processor"; Arm's has none."""


def read_cpu(sysfs: Folder, proc: Folder = "/proc") -> Cpu:
    """Read this machine's processors; ``physical`` is the number of cores of the CPUs that this process may run on."""
    listed = read_text(os.path.join(sysfs, "devices/system/cpu/online"))
    online = parse_cpulist(listed or "") or tuple(range(os.cpu_count() or 1))
    try:
        allowed = tuple(sorted(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not Linux, or a container that forbids it
        allowed = online
    total, available = _read_memory(proc)
    return Cpu(
        name=_read_model_name(proc),
        logical=len(online),
        physical=_count_cores(sysfs, allowed),
        allowed=allowed,
        numa=read_numa(sysfs, online),
        memory_total=total,
        memory_available=available,
        quota=_read_quota(sysfs, proc),
    )


def _read_model_name(proc: Folder) -> str | None:
    try:
        with open(os.path.join(proc, "cpuinfo"), "rb") as file:
            model = MODEL_NAME.search(file.read(FIRST_PROCESSOR).decode(errors="replace"))
    except OSError:
        return None
    return model[1].strip() if model else None


def _count_cores(sysfs: Folder, allowed: tuple[int, ...]) -> int:
    """Count the cores of the allowed CPUs: sysfs lists the hardware threads of each CPU's core, itself included."""
    cores = 0
    counted: set[int] = set()
    for cpu in allowed:
        if cpu not in counted:
            topology = os.path.join(sysfs, f"devices/system/cpu/cpu{cpu}/topology")
            siblings = parse_cpulist(read_text(f"{topology}/thread_siblings_list") or "")
            if not siblings:
                try:
                    return min(_import_psutil().cpu_count(logical=False) or len(allowed), len(allowed))
                except OSError:  # Linux without /proc
                    return len(allowed)
            counted.update(siblings)
            cores += 1
    return cores


def _read_memory(proc: Folder) -> tuple[int | None, int | None]:
    sizes = read_counters(os.path.join(proc, "meminfo"))  # "MemTotal:       16316412 kB"
    if not sizes:
        try:
            memory = _import_psutil().virtual_memory()
        except OSError:  # Linux without /proc
            return None, None
        return memory.total, memory.available
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return (total * 1024 if total else None), (available * 1024 if available else None)


def _import_psutil() -> Any:
    # Imported late: it takes 17 ms, and is needed only where the kernel has no such files (macOS).
    return importlib.import_module("psutil")


def _read_quota(sysfs: Folder, proc: Folder) -> float | None:
    """Return the CPU quota of this process's control group, in CPUs; None if there is no limit.

    ``docker run --cpus 4`` sets it (cpu.max in Documentation/admin-guide/cgroup-v2.rst of the kernel, cpu.cfs_quota_us
    in scheduler/sched-bwc.rst). The smallest quota counts, of this group or a parent; a container sees only its own.
    """
    shares = map(_read_group_quota, list_cgroup_dirs("cpu", sysfs=sysfs, proc=proc))
    return min((share for share in shares if share is not None), default=None)


def _read_group_quota(group: str) -> float | None:
    quota, _, period = (read_text(f"{group}/cpu.max") or "").partition(" ")
    if not period:
        quota, period = (read_text(f"{group}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return share if share > 0 else None
