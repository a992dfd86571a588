"""Check of torch: its version, whether CUDA works, and for which GPUs it was built."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import TextLine
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.node_facts import NodeFacts, TorchInfo
from ddplaunch.features.doctor.probe import TORCH_IMPORT_TIMEOUT_S


class TorchFacts(Struct, frozen=True):
    """The fields of ``NodeFacts`` on torch."""

    torch: TorchInfo | None
    torch_error: TextLine | None


def _read(context: CheckContext) -> FactReader:
    def wait_for_facts() -> dict[str, object]:
        found = context.benchmark_process.read_first_line(TorchFacts, TORCH_IMPORT_TIMEOUT_S)
        timeout = f"torch was not imported within {TORCH_IMPORT_TIMEOUT_S:g} s"
        why = timeout if context.benchmark_process.timed_out else "import torch terminated Python"
        return {"python": "{}.{}.{}".format(*sys.version_info[:3]), **asdict(found or TorchFacts(None, why))}

    return wait_for_facts


def read_torch() -> TorchFacts:
    """Import torch and read its facts."""
    try:
        module: Any = importlib.import_module("torch")
    except BaseException as error:  # a broken library may raise anything
        return TorchFacts(None, sanitize_line(f"{type(error).__name__}: {error}", 300))
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
            why_not = sanitize_line(str(error).partition("\n")[0], 300)
    nccl = None
    with suppress(Exception):
        nccl = ".".join(map(str, module.cuda.nccl.version()))
    count = module.cuda.device_count() if works else 0
    more = tuple(architectures), tuple(capabilities), why_not
    return TorchFacts(TorchInfo(str(module.__version__), cuda, nccl, count, *more), None)


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.torch is None:
        text = facts.torch_error or "no torch"
        is_missing = text.endswith(("no torch", "No module named 'torch'"))
        hint = "install torch for this Python: pip install torch" if is_missing else "see: python -c 'import torch'"
        yield Finding(Severity.ERROR, name, text, hint)
        return
    if facts.gpus and not facts.torch.cuda and any(gpu.driver for gpu in facts.gpus):
        gpus = f"{len(facts.gpus)} GPU{'s' * (len(facts.gpus) > 1)}"
        text = f"torch {facts.torch.version} was built without CUDA, but this machine has {gpus}"
        yield Finding(Severity.ERROR, name, text, "install a build with CUDA: https://pytorch.org/get-started")
    if facts.torch.why_not and facts.gpus and not facts.lost_gpus:  # with a lost GPU, CUDA fails for the others too
        driver = next((gpu.driver for gpu in facts.gpus if gpu.driver), "unknown")
        text = f"torch cannot use CUDA {facts.torch.cuda} with driver {driver}: {facts.torch.why_not}"
        yield Finding(Severity.ERROR, name, text, "update the driver, or install torch for an older CUDA")
    if facts.torch.architectures:
        for index, capability in enumerate(facts.torch.capabilities):
            if not _is_compatible(capability, facts.torch.architectures):
                built = ", ".join(facts.torch.architectures)
                text = f"it is {capability}, but torch {facts.torch.version} was built for {built}"
                yield Finding(Severity.ERROR, f"{name} cuda:{index}", text, "install another build of torch")


def _is_compatible(capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether a GPU can run kernels built for one of ``architectures``: same major version, or PTX for an older one."""
    major, minor = divmod(int(capability.removeprefix("sm_")), 10)
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        if not digits[:-1].isdigit() or not digits[-1:].isdigit():  # "sm_90a", or AMD's "gfx90a"
            if kind.startswith("gfx"):
                return True
            digits = digits.rstrip("af")
        built = divmod(int(digits), 10)
        if kind == "compute" and built <= (major, minor):
            return True
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
    return False


def _summarize_torch(facts: NodeFacts) -> str | None:
    if facts.torch is None:
        return None
    more = [f"{name} {value}" for name, value in (("CUDA", facts.torch.cuda), ("NCCL", facts.torch.nccl)) if value]
    return ", ".join([facts.torch.version, *more])


CHECK = HealthCheck(_read, _find_problems, {"Python": lambda facts: facts.python, "torch": _summarize_torch})
