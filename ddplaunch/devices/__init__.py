"""What this machine has: one small reader a vendor, none of which needs torch, and ``read_hardware`` over all of them.

Which of the GPUs a job may use, and in which order, is for ``visible.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ddplaunch.devices.amd import read_amd
from ddplaunch.devices.apple import read_apple
from ddplaunch.devices.cpu import read_cpu
from ddplaunch.devices.intel import read_intel
from ddplaunch.devices.nvidia import read_nvidia
from ddplaunch.devices.sysfs import Folder
from ddplaunch.plan.hardware import Gpu, GpusFailed, Hardware, LostGpu


def read_hardware(*, processes: bool = False, sysfs: Folder = "/sys", dev: Folder = "/dev") -> Hardware:
    """Read this machine's processors and accelerators; whatever fails is a note, never an exception.

    ``processes`` also lists who uses each GPU; ``sysfs`` and ``dev`` are the kernel's trees, or those that tests make.
    """
    gpus: list[Gpu] = []
    notes: list[str] = []
    failed: str | None = None
    lost: list[LostGpu] = []
    readers: dict[str, Callable[[], tuple[list[Gpu], list[str]]]] = {
        "NVIDIA": partial(read_nvidia, sysfs, dev, processes=processes, lost=lost),
        "AMD": partial(read_amd, sysfs, processes=processes),
        "Intel": partial(read_intel, sysfs),
        "Apple": read_apple,
    }
    for vendor, read in readers.items():
        try:
            found, said = read()
        except GpusFailed as error:
            notes += error.notes
            failed = error.shown_by
        except Exception as error:  # a driver's surprise must not keep a job from starting that may not even need it
            notes.append(f"{vendor} GPUs could not be read: {type(error).__name__}: {error}.")
        else:
            gpus += found
            notes += said
    return Hardware(read_cpu(sysfs), tuple(gpus), tuple(notes), failed, tuple(lost))
