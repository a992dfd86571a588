"""Describes this machine for the planner: the devices that the job may use, and the CPUs near them.

Also checks that GPUs which were allocated or requested work: without them a job must not silently train on CPUs.
``--gpus none`` and ``--nproc cpu`` request CPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.devices.visible_gpus import NO_GPUS, are_all_hidden, single_device_environments, visible_gpus
from ddplaunch.system.plan.domain import find_domain
from ddplaunch.system.plan.hardware import Hardware
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.planner import MachineInfo, PlanSpec
from ddplaunch.system.plan.rank_layout import DeviceSlot
from ddplaunch.system.plan.rendezvous import uses_nccl

GPU_COUNT_VARIABLES = ("SLURM_GPUS_ON_NODE", "SM_NUM_GPUS", "SKYPILOT_NUM_GPUS_PER_NODE", "MLP_WORKER_GPU")
"""Variables with the number of GPUs that a scheduler allocated on this node: Slurm, SageMaker, SkyPilot, Volcengine.
Those of dstack, DGX Cloud Lepton and ModelArts count accelerators of any kind, so they do not prove GPUs.
"""

CONTAINER_GPUS_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""Set in containers. Kubernetes lists the GPUs of a pod by UUID; "all" proves nothing: CUDA images set it."""

NAMED_GPU_PATTERN = r"(?i)(GPU-|MIG-|\d)"


def read_machine(environ: Mapping[str, str], spec: PlanSpec, *, runs_here: bool) -> tuple[MachineInfo, tuple[str, ...]]:
    """Read this machine's hardware and select what the job may use; also returns notes for the user.

    ``runs_here``: whether the job runs on this machine; otherwise this machine stands for those that it will run on.

    Raises UsageError if a GPU of ``--gpus`` does not exist, or GPUs were allocated or requested and none works.
    """
    hardware = read_hardware()
    visible = visible_gpus(hardware, spec.gpus, environ)
    if runs_here:
        check_expected_gpus(hardware, visible, environ, spec)
    devices = zip(visible.devices, visible.gpus, strict=True)
    slots = tuple(
        DeviceSlot(
            device,
            each.gpu.name,
            each.gpu.cpus,
            visible.backend,
            divided_gpu=each.gpu.index if each.mig else None,
            address=each.gpu.address,
        )
        for device, each in devices
    )
    machine = MachineInfo(
        host=host_name(),
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=min(hardware.cpu.physical, hardware.cpu.usable_count),
        usable_cpus=hardware.cpu.usable_count,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=slots,
        slots_source=visible.source,
        gpu_addresses={gpu.index: gpu.address for gpu in hardware.gpus},
        is_cpu_bound=len(hardware.cpu.allowed) < (os.cpu_count() or 1),
        variables=visible.environ,
        device_masks=single_device_environments(visible, environ) if spec.virtual_local_rank else (),
        domain=find_domain(spec.domain, [each.gpu.fabric for each in visible.gpus], environ) if runs_here else None,
    )
    return machine, (*hardware.notes, *visible.notes)


def check_expected_gpus(hardware: Hardware, visible: VisibleGpus, environ: Mapping[str, str], spec: PlanSpec) -> None:
    """Raise UsageError if GPUs were allocated or requested but none works, unless the user requested CPUs.

    Its message has the evidence for the GPUs, the driver's error, and the option that runs the job on CPUs.
    """
    wants_cpus = spec.gpus == NO_GPUS or spec.nproc == "cpu"
    if not wants_cpus and (evidence := gpu_evidence(hardware, visible, environ, spec)) is not None:
        why = next(iter(hardware.notes), "`ddplaunch devices` shows what this machine has")
        instead = "--gpus none, without --backend nccl," if uses_nccl(spec.backend) else "--gpus none"
        raise UsageError(f"{evidence}, but no GPU of this machine works", f"{why}\n{instead} runs the job on CPUs")


def gpu_evidence(hardware: Hardware, visible: VisibleGpus, environ: Mapping[str, str], spec: PlanSpec) -> str | None:
    """Return the evidence that this machine should have GPUs; None if a GPU works, or there is no evidence."""
    if visible.gpus:
        return None
    if hardware.notes and uses_nccl(spec.backend):  # without notes there is no driver either, which the planner reports
        return f"--backend {spec.backend} needs GPUs"
    if hardware.notes and spec.nproc == "gpu":
        return "--nproc gpu counts GPUs"
    if are_all_hidden(environ):
        return None
    for name in GPU_COUNT_VARIABLES:
        if (parse_int(environ.get(name, "")) or 0) > 0:
            return f"{name}={environ[name]}"
    container = environ.get(CONTAINER_GPUS_VARIABLE, "")
    named = re.match(NAMED_GPU_PATTERN, container)
    return f"{CONTAINER_GPUS_VARIABLE}={container}" if named else hardware.gpu_evidence
