"""This machine as the plan needs it: its devices that a job may use, and the CPUs beside them.

And whether GPUs that this job was given, or asked for, are there: a job that loses them must not train on CPUs unasked.
``--gpus none`` and ``--nproc cpu`` are how people ask for CPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ddplaunch.devices import read_hardware
from ddplaunch.devices.vendor import VisibleGpus
from ddplaunch.devices.visible import NO_GPUS, are_all_hidden, single_device_environments, visible_gpus
from ddplaunch.errors import UsageError, host_name
from ddplaunch.plan.hardware import Hardware
from ddplaunch.plan.layout import DeviceSlot
from ddplaunch.plan.make import MachineInfo, PlanSpec
from ddplaunch.plan.numbers import parse_int
from ddplaunch.plan.rendezvous import uses_nccl

GPU_COUNT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SM_NUM_GPUS", "SKYPILOT_NUM_GPUS_PER_NODE", "MLP_WORKER_GPU")
"""The variables in which a scheduler says how many GPUs it has given this node: Slurm's, SageMaker's, SkyPilot's,
Volcengine's. dstack, DGX Cloud Lepton and ModelArts count accelerators of any kind, which say nothing of GPUs.
"""

CONTAINER_GPUS_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""What a container was started with. Kubernetes names the GPUs of a pod by UUID; "all" is any CUDA image's default."""

NAMED_GPU_PATTERN = r"(?i)(GPU-|MIG-|\d)"


def read_machine(environ: Mapping[str, str], spec: PlanSpec, *, runs_here: bool) -> tuple[MachineInfo, tuple[str, ...]]:
    """Ask the machine what it has and which of it is the job's; the notes are for people.

    ``runs_here``: whether the job runs on this machine; else this machine is an example for another one.

    Raises UsageError if there are no such GPUs, or GPUs were given or asked for and none works.
    """
    hardware = read_hardware()
    visible = visible_gpus(hardware, spec.gpus, environ)
    if runs_here:
        check_expected_gpus(hardware, visible, environ, spec)
    named = zip(visible.devices, visible.gpus, strict=True)
    slots = tuple(DeviceSlot(device, each.gpu.name, each.gpu.cpus, visible.backend) for device, each in named)
    machine = MachineInfo(
        host=host_name(),
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=min(hardware.cpu.physical, hardware.cpu.usable),
        usable_cpus=hardware.cpu.usable,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=slots,
        slots_source=visible.source,
        is_cpu_bound=len(hardware.cpu.allowed) < (os.cpu_count() or 1),
        variables=visible.environ,
        device_masks=single_device_environments(visible, environ) if spec.virtual_local_rank else (),
    )
    return machine, (*hardware.notes, *visible.notes)


def check_expected_gpus(hardware: Hardware, visible: VisibleGpus, environ: Mapping[str, str], spec: PlanSpec) -> None:
    """Refuse to run on CPUs where GPUs were given or asked for and none works.

    The UsageError says what shows that there are GPUs, what the driver says, and what runs the job on CPUs.
    """
    meant = spec.gpus == NO_GPUS or spec.nproc == "cpu"
    if not meant and (said := gpu_evidence(hardware, visible, environ, spec)) is not None:
        why = next(iter(hardware.notes), "`ddplaunch devices` shows what this machine has")
        instead = "--gpus none, without --backend nccl," if uses_nccl(spec.backend) else "--gpus none"
        raise UsageError(f"{said}, but no GPU of this machine works", f"{why}\n{instead} runs the job on CPUs")


def gpu_evidence(hardware: Hardware, visible: VisibleGpus, environ: Mapping[str, str], spec: PlanSpec) -> str | None:
    """Say what shows that there are GPUs where none works; None where one works, or nothing shows any."""
    if visible.gpus:
        return None
    if hardware.notes and uses_nccl(spec.backend):  # else there is no driver either: that is for the plan to say
        return f"--backend {spec.backend} needs GPUs"
    if hardware.notes and spec.nproc == "gpu":
        return "--nproc gpu counts GPUs"
    if are_all_hidden(environ):
        return None
    for name in GPU_COUNT_VARIABLES:
        if (parse_int(environ.get(name, "")) or 0) > 0:
            return f"{name}={environ[name]}"
    return (
        f"{CONTAINER_GPUS_VARIABLE}={environ[CONTAINER_GPUS_VARIABLE]}"
        if re.match(NAMED_GPU_PATTERN, environ.get(CONTAINER_GPUS_VARIABLE, ""))
        else hardware.gpu_evidence
    )
