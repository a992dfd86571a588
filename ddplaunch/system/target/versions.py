"""Versions of Python, torch, CUDA and NCCL that a job uses here; read from files, without importing torch."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder

from msgspec import Struct

from ddplaunch.base.types import Name

_NCCL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")
_GPU_BUILD = re.compile(r"^(?:cuda|hip)\b[^=\n]*= *['\"]", re.MULTILINE)


class Versions(Struct, frozen=True):
    """Versions that must be equal for ranks to work together; None: unknown or not installed."""

    python: Name  # "3.11", and torch "2.13": patch levels may differ
    torch: Name | None = None
    cuda: Name | None = None
    nccl: Name | None = None


def read_versions(*, torch: bool) -> Versions:
    """Read torch/version.py, which holds assignments only, and the name of the NCCL distribution next to it.

    ``torch=False`` for a program, which need not be Python.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not torch or not (found := _read_torch_version()):
        return Versions(python)
    text, names = found
    version, cuda = _read_assignment(text, "__version__"), _read_assignment(text, "cuda")
    nccl = next((match[1] for name in names if (match := _NCCL.fullmatch(name))), None)
    return Versions(python, ".".join(version.split(".")[:2]) if version else None, cuda, nccl)


def cpu_only_torch() -> str | None:
    """Return the installed torch version if it is a CPU-only build, "torch 2.13.0+cpu"; else None."""
    text, _ = _read_torch_version() or ("", [])
    return f"torch {_read_assignment(text, '__version__')}" if text and not _GPU_BUILD.search(text) else None


def _read_torch_version() -> tuple[str, list[str]] | None:
    """Return the text of torch/version.py, and the names in the folder that contains the torch package."""
    found = PathFinder.find_spec("torch")
    if found is None or not found.origin:
        return None
    folder = os.path.dirname(found.origin)
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return file.read(), os.listdir(os.path.dirname(folder))
    except OSError:
        return None


def _read_assignment(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else None
