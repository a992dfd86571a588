"""Reads this machine's CPUs, memory and GPUs (``read_hardware``); one file for each GPU vendor, none needs torch.

``visible_gpus`` decides which of the GPUs a job may use, and in which order. A new vendor is a file and its name in
``VENDORS``.
"""

from __future__ import annotations

from ddplaunch.system.devices.amd import AMD
from ddplaunch.system.devices.cpu import read_cpu
from ddplaunch.system.devices.intel import INTEL
from ddplaunch.system.devices.nvidia import NVIDIA
from ddplaunch.system.devices.sysfs import Folder
from ddplaunch.system.devices.vendor import KernelTrees
from ddplaunch.system.plan.hardware import Gpu, GpusFailed, Hardware, LostGpu

VENDORS = (NVIDIA, AMD, INTEL)


def read_hardware(*, processes: bool = False, sysfs: Folder = "/sys", dev: Folder = "/dev") -> Hardware:
    """Read this machine's processors and accelerators; errors become notes, never exceptions.

    ``processes`` also lists the processes on each GPU; ``sysfs`` and ``dev`` are the kernel's, or a test's.
    """
    gpus: list[Gpu] = []
    notes_or_lost: list[str | LostGpu] = []
    failed: str | None = None
    for vendor in VENDORS:
        try:
            vendor_gpus, vendor_notes = vendor.read(KernelTrees(sysfs, dev, processes))
        except GpusFailed as error:
            notes_or_lost += error.notes
            failed = error.evidence
        except Exception as error:  # an unexpected driver error must not stop a job that may not even use the GPUs
            notes_or_lost.append(f"{vendor.title} GPUs could not be read: {type(error).__name__}: {error}.")
        else:
            gpus += vendor_gpus
            notes_or_lost += vendor_notes
    notes = tuple(each.note if isinstance(each, LostGpu) else each for each in notes_or_lost)
    lost = tuple(each for each in notes_or_lost if isinstance(each, LostGpu))
    return Hardware(read_cpu(sysfs), tuple(gpus), notes, failed, lost)
