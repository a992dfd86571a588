"""Check of the GPUs, by their driver: lost GPUs, memory errors, throttled clocks, and processes that use them."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.base.text import format_size
from ddplaunch.base.types import TextLine
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.node_facts import NodeFacts
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, HelperProbe
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.gpu_health import GpuHealth, read_health
from ddplaunch.system.plan.hardware import GPU_BUSY_BYTES, LostGpu


class GpuFacts(Struct, frozen=True):
    """The fields of ``NodeFacts`` on GPUs."""

    gpus: tuple[GpuHealth, ...]
    gpus_error: TextLine | None
    lost_gpus: tuple[LostGpu, ...]


def _read(_: CheckContext) -> FactReader:
    probe = HelperProbe.for_function(read_gpus)
    silent = GpuFacts((), f"the GPU driver did not answer within {REPLY_TIMEOUT_S:g} s", ())
    return lambda: asdict(probe.read_result(GpuFacts, REPLY_TIMEOUT_S) or silent)


def read_gpus() -> GpuFacts:
    """Read the GPUs and their health."""
    hardware = read_hardware(processes=True)
    lost_notes = [each.note for each in hardware.lost_gpus]
    notes = [note for note in hardware.notes if note not in lost_notes]
    return GpuFacts(read_health(hardware.gpus), " ".join(notes) or None, hardware.lost_gpus)


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.gpus_error:
        severity = Severity.WARNING if facts.gpus else Severity.ERROR
        yield Finding(severity, name, facts.gpus_error, "see `nvidia-smi` and the kernel's log (dmesg)")
    for lost in facts.lost_gpus:
        hint = "search for Xid in the kernel's log (dmesg), and reboot; if it is lost again, replace it"
        yield Finding(Severity.ERROR, f"{name} GPU {lost.index}", f"the driver cannot reach it: {lost.why}", hint)
    for gpu in facts.gpus:
        yield from _check_gpu(f"{name} GPU {gpu.index}", gpu)


def _check_gpu(subject: str, gpu: GpuHealth) -> Findings:
    if gpu.memory_used is not None and gpu.memory_total and (gpu.processes or gpu.memory_used > GPU_BUSY_BYTES):
        users = ", ".join(each.description for each in gpu.processes)
        used = f"{format_size(gpu.memory_used)} of {format_size(gpu.memory_total)} are in use"
        text = f"{used}, by {users}" if users else f"{used}, by processes that this user cannot see"
        yield Finding(Severity.WARNING, subject, text, "end these processes, or exclude the GPU: --gpus")
    if gpu.worn_out:
        text = "its memory has broken rows, and no spare rows are left"
        yield Finding(Severity.ERROR, subject, text, "exclude the GPU (--gpus), and replace it")
    elif gpu.needs_reset:
        text = "its memory has faulty rows or pages, which a reset replaces"
        yield Finding(Severity.WARNING, subject, text, "reset it while it is idle: nvidia-smi --gpu-reset, or reboot")
    if gpu.memory_errors:
        text = f"{gpu.memory_errors} memory errors since the driver was loaded that ECC could not correct"
        yield Finding(Severity.WARNING, subject, text, "reset the GPU; if they return, replace it")
    if gpu.slowed_by:
        heat = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
        text = f"its clock is reduced by {' and '.join(gpu.slowed_by)}{heat}"
        yield Finding(Severity.WARNING, subject, text, "check the cooling and the power supply of the machine")


def _summarize_gpus(facts: NodeFacts) -> str:
    if not facts.gpus:
        return "none"
    models = [gpu.name for gpu in facts.gpus]
    counts = " and ".join(f"{models.count(name)} {name}" for name in dict.fromkeys(models))
    driver = next((f", driver {gpu.driver}" for gpu in facts.gpus if gpu.driver), "")
    return f"{counts}{driver}"


def _format_temperatures(facts: NodeFacts) -> str | None:
    return ", ".join(f"{gpu.temperature}" for gpu in facts.gpus if gpu.temperature is not None) or None


CHECK = HealthCheck(_read, _find_problems, {"GPUs": _summarize_gpus, "degrees C": _format_temperatures})
