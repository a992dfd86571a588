"""Who a process is, for the GPU readers, which learn only its number from their drivers."""

from __future__ import annotations

import importlib

from ddplaunch import TYPE_CHECKING
from ddplaunch.plan.hardware import GpuProcess

if TYPE_CHECKING:
    from typing import Any


def describe_process(pid: int, memory: int | None) -> GpuProcess:
    """Return the process with its name and user, None where it is gone or hidden (another container's, ``hidepid``)."""
    psutil: Any = importlib.import_module("psutil")
    name = user = None
    try:
        process = psutil.Process(pid)
        name = process.name()
        user = process.username()
    except psutil.Error:
        pass
    return GpuProcess(pid, name, user, memory)
