"""What a child of ``inquiry`` finds out: one function a subject, its answer one line of JSON."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ddplaunch.commands.doctor.facts import CACHE, Folder, Torch
from ddplaunch.dataclass import dataclass
from ddplaunch.devices import read_hardware
from ddplaunch.devices.gpu_health import GpuHealth, read_health
from ddplaunch.errors import shown
from ddplaunch.plan.hardware import LostGpu


@dataclass(frozen=True)
class GpusFound:
    gpus: tuple[GpuHealth, ...]
    error: str | None  # why GPUs that are there cannot be used
    lost: tuple[LostGpu, ...]


@dataclass(frozen=True)
class TorchFound:
    torch: Torch | None
    error: str | None


def main() -> None:
    """Answer the question in our arguments on stdout, whatever else wants to print there."""
    out = os.dup(1)
    os.dup2(2, 1)
    os.write(out, b"begun\n")
    subject, *words = sys.argv[1:]
    subjects: dict[str, Callable[..., object]] = {"gpus": gpus, "torch": torch, "folder": folder}
    answer = subjects[subject](*words)
    os.write(out, msgspec.json.encode(answer) + b"\n")
    os._exit(0)  # torch would take its time to end


def gpus() -> GpusFound:
    """The GPUs and how they are."""
    hardware = read_hardware(processes=True)
    told = [each.note for each in hardware.lost]
    notes = [note for note in hardware.notes if note not in told]
    return GpusFound(read_health(hardware.gpus), " ".join(notes) or None, hardware.lost)


def torch() -> TorchFound:
    """What torch says of itself."""
    try:
        module: Any = importlib.import_module("torch")
    except BaseException as error:  # a broken library may do anything
        return TorchFound(None, shown(f"{type(error).__name__}: {error}", 300))
    cuda, why_not, capabilities, architectures = module.version.cuda or module.version.hip, None, [], []
    works = False
    if cuda:
        try:
            module.cuda.init()
            works = True
            for device in range(module.cuda.device_count()):
                capabilities.append("sm_{}{}".format(*module.cuda.get_device_capability(device)))
            architectures = module.cuda.get_arch_list()
        except Exception as error:
            why_not = shown(str(error).partition("\n")[0], 300)
    nccl = None
    with suppress(Exception):
        nccl = ".".join(map(str, module.cuda.nccl.version()))
    count = module.cuda.device_count() if works else 0
    about = Torch(
        str(module.__version__), cuda, nccl, works, count, tuple(architectures), tuple(capabilities), why_not=why_not
    )
    return TorchFound(about, None)


def folder(what: str, path: str) -> Folder:
    """Whether a folder can be written to, and how much."""
    place = path
    while what == CACHE and not os.path.exists(place) and place != os.path.dirname(place):  # it will be made
        place = os.path.dirname(place)
    try:
        room = os.statvfs(place)
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    except OSError as error:
        return Folder(what, error=error.strerror)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Folder(what, total, free, error=error.strerror)
    return Folder(what, total, free)
