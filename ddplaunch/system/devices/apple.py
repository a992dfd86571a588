"""The GPU of an Apple silicon Mac, torch's device "mps". It uses the machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ddplaunch.system.devices.vendor import KernelTrees, ReadResult, Vendor, VisibleGpu, VisibleGpus, as_whole_gpu
from ddplaunch.system.plan.hardware import Gpu


def read_apple(trees: KernelTrees) -> ReadResult:
    """Return the one GPU of an Apple silicon Mac, named after its chip, and no notes; no GPU on other machines."""
    if sys.platform != "darwin" or os.uname().machine != "arm64":
        return [], []
    return [Gpu("apple", 0, _read_chip_name())], []


def _read_chip_name() -> str:

    try:
        words = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        result = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "Apple GPU"
    return result.stdout.strip() or "Apple GPU"  # "Apple M3 Max"


def _visible_metal(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus:
    return VisibleGpus(tuple(map(as_whole_gpu, gpus)), "Metal")


def _select(chosen: Sequence[VisibleGpu], notes: list[str], environ: Mapping[str, str]) -> VisibleGpus:
    return VisibleGpus(tuple(chosen), "--gpus", {}, tuple(notes))


APPLE = Vendor("apple", "Apple", "mps", read_apple, _visible_metal, _select, has_indices=False)
