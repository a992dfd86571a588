"""What this machine has: a file a vendor, none of which needs torch, and ``read_hardware`` over all of them.

Which of the GPUs a job may use, and in which order, is for ``visible.py``.
"""

from __future__ import annotations

from ddplaunch.devices.amd import AMD
from ddplaunch.devices.apple import APPLE
from ddplaunch.devices.cpu import read_cpu
from ddplaunch.devices.intel import INTEL
from ddplaunch.devices.nvidia import NVIDIA
from ddplaunch.devices.sysfs import Folder
from ddplaunch.devices.vendor import KernelTrees
from ddplaunch.plan.hardware import Gpu, GpusFailed, Hardware, LostGpu

VENDORS = (NVIDIA, AMD, INTEL, APPLE)


def read_hardware(*, processes: bool = False, sysfs: Folder = "/sys", dev: Folder = "/dev") -> Hardware:
    """Read this machine's processors and accelerators; whatever fails is a note, never an exception.

    ``processes`` also lists who uses each GPU; ``sysfs`` and ``dev`` are the kernel's trees, or those that tests make.
    """
    gpus: list[Gpu] = []
    said: list[str | LostGpu] = []
    failed: str | None = None
    for vendor in VENDORS:
        try:
            found, told = vendor.read(KernelTrees(sysfs, dev, processes))
        except GpusFailed as error:
            said += error.notes
            failed = error.shown_by
        except Exception as error:  # a driver's surprise must not keep a job from starting that may not even need it
            said.append(f"{vendor.title} GPUs could not be read: {type(error).__name__}: {error}.")
        else:
            gpus += found
            said += told
    notes = tuple(each.note if isinstance(each, LostGpu) else each for each in said)
    lost = tuple(each for each in said if isinstance(each, LostGpu))
    return Hardware(read_cpu(sysfs), tuple(gpus), notes, failed, lost)
