"""This machine as the plan needs it: its devices that a job may use, and the CPUs beside them.

And whether GPUs that this job was given, or asked for, are there: a job that loses them must not train on CPUs unasked.
``--gpus none`` and ``--nproc cpu`` are how people ask for CPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ddplaunch.devices import read_hardware
from ddplaunch.devices.vendor import Visible
from ddplaunch.devices.visible import NONE, alone, hidden, visible_gpus
from ddplaunch.errors import UsageError, host_name
from ddplaunch.plan.hardware import Hardware
from ddplaunch.plan.layout import Slot
from ddplaunch.plan.make import JobSpec, Machine
from ddplaunch.plan.numbers import whole
from ddplaunch.plan.rendezvous import is_nccl

COUNTS = ("SLURM_GPUS_ON_NODE", "SM_NUM_GPUS", "SKYPILOT_NUM_GPUS_PER_NODE", "MLP_WORKER_GPU")
"""The variables in which a scheduler says how many GPUs it has given this node: Slurm's, SageMaker's, SkyPilot's,
Volcengine's. dstack, DGX Cloud Lepton and ModelArts count accelerators of any kind, which say nothing of GPUs.
"""

CONTAINER = "NVIDIA_VISIBLE_DEVICES"
"""What a container was started with. Kubernetes names the GPUs of a pod by UUID; "all" is any CUDA image's default."""

NAMED = r"(?i)(GPU-|MIG-|\d)"


def read_machine(environ: Mapping[str, str], spec: JobSpec, *, runs_here: bool) -> tuple[Machine, tuple[str, ...]]:
    """Ask the machine what it has and which of it is the job's; the notes are for people.

    ``runs_here``: whether the job runs on this machine; else this machine is an example for another one.

    Raises UsageError if there are no such GPUs, or GPUs were given or asked for and none works.
    """
    hardware = read_hardware()
    visible = visible_gpus(hardware, spec.gpus, environ)
    if runs_here:
        check_given(hardware, visible, environ, spec)
    named = zip(visible.devices, visible.gpus, strict=True)
    slots = tuple(Slot(device, each.gpu.name, each.gpu.cpus, visible.backend) for device, each in named)
    machine = Machine(
        host=host_name(),
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=min(hardware.cpu.physical, hardware.cpu.usable),
        usable_cpus=hardware.cpu.usable,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=slots,
        slots_source=visible.source,
        bound=len(hardware.cpu.allowed) < (os.cpu_count() or 1),
        variables=visible.environ,
        masks=alone(visible, environ) if spec.virtual_local_rank else (),
    )
    return machine, (*hardware.notes, *visible.notes)


def check_given(hardware: Hardware, visible: Visible, environ: Mapping[str, str], spec: JobSpec) -> None:
    """Refuse to run on CPUs where GPUs were given or asked for and none works.

    The UsageError says what shows that there are GPUs, what the driver says, and what runs the job on CPUs.
    """
    meant = spec.gpus == NONE or spec.nproc == "cpu"
    if not meant and (said := claim(hardware, visible, environ, spec)) is not None:
        why = next(iter(hardware.notes), "`ddplaunch devices` shows what this machine has")
        instead = "--gpus none, without --backend nccl," if is_nccl(spec.backend) else "--gpus none"
        raise UsageError(f"{said}, but no GPU of this machine works", f"{why}\n{instead} runs the job on CPUs")


def claim(hardware: Hardware, visible: Visible, environ: Mapping[str, str], spec: JobSpec) -> str | None:
    """Say what shows that there are GPUs where none works; None where one works, or nothing shows any."""
    if visible.gpus:
        return None
    if hardware.notes and is_nccl(spec.backend):  # else there is no driver either: that is for the plan to say
        return f"--backend {spec.backend} needs GPUs"
    if hardware.notes and spec.nproc == "gpu":
        return "--nproc gpu counts GPUs"
    if hidden(environ):
        return None
    for name in COUNTS:
        if (whole(environ.get(name, "")) or 0) > 0:
            return f"{name}={environ[name]}"
    return f"{CONTAINER}={environ[CONTAINER]}" if re.match(NAMED, environ.get(CONTAINER, "")) else hardware.failed
