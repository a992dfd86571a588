"""Builds this node's hello: node spec, versions, GPUs, hash of the target. Reads files; does not import torch."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from importlib.machinery import PathFinder

from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.messages import NodeHello, Versions
from ddplaunch.system.plan.node_spec import make_node_spec
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import Target, TargetKind

MAX_HASHED_BYTES = 64 << 20
"""Of a target file, for the comparison between nodes; the rest of a larger one is not compared."""

_NCCL = re.compile(r"nvidia_nccl_cu\d+-([\d.]+)\.dist-info")


def build_hello(plan: Plan, config: JobConfig) -> NodeHello:
    """Build the hello of this node."""
    return NodeHello(
        node_spec=make_node_spec(plan),
        nnodes=config.nnodes_text,
        run_id=config.run_id,
        target=_sanitize(plan.target.text),
        fingerprint=_fingerprint(plan.target),
        max_restarts=config.max_restarts,
        versions=read_versions(torch=plan.target.kind is not TargetKind.PROGRAM),
        gpus=tuple(dict.fromkeys(map(_sanitize, plan.gpus))),
        has_node_rank=plan.has_node_rank,
    )


def _sanitize(text: str) -> str:
    """Replace characters that may not be sent or printed by "?"."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _fingerprint(target: Target) -> str | None:
    path = target.source or target.path
    if path is None:
        return None

    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(MAX_HASHED_BYTES)).hexdigest()[:12]
    except OSError:
        return None


def read_versions(*, torch: bool) -> Versions:
    """Read torch/version.py, which holds assignments only, and the name of the NCCL distribution beside it.

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
    """The installed torch if it is a CPU-only build: "torch 2.13.0+cpu"."""
    text, _ = _read_torch_version() or ("", [])
    return (
        f"torch {_read_assignment(text, '__version__')}"
        if text and not re.search(_GPU_BUILD, text, re.MULTILINE)
        else None
    )


def _read_torch_version() -> tuple[str, list[str]] | None:
    """Return the text of torch/version.py, and the names in the folder of the torch package."""

    found = PathFinder.find_spec("torch")
    if found is None or not found.origin:
        return None
    folder = os.path.dirname(found.origin)
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return file.read(), os.listdir(os.path.dirname(folder))
    except OSError:
        return None


_GPU_BUILD = r"^(?:cuda|hip)\b[^=\n]*= *['\"]"


def _read_assignment(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else None
