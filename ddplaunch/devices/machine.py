"""This machine as the plan needs it: its devices that a job may use, and the CPUs beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.devices import read_hardware
from ddplaunch.devices.given import check_given
from ddplaunch.devices.visible import alone, visible_gpus
from ddplaunch.plan.layout import Slot
from ddplaunch.plan.make import Machine


def read_machine(
    environ: Mapping[str, str],
    *,
    gpus: str | None,
    nproc: str | None,
    backend: str | None,
    masked: bool,
    runs_here: bool,
) -> tuple[Machine, tuple[str, ...]]:
    """Ask the machine what it has and which of it is ours; the notes are for people.

    Args:
        gpus, nproc, backend: the options.
        masked: whether each rank is to see its own device alone.
        runs_here: whether the job runs on this machine; else this machine is an example for another one.

    Raises UsageError if there are no such GPUs, or GPUs were given or asked for and none works.
    """
    hardware = read_hardware()
    visible = visible_gpus(hardware, gpus, environ)
    if runs_here:
        check_given(hardware, visible, environ, gpus=gpus, nproc=nproc, backend=backend)
    named = zip(visible.devices, visible.gpus, strict=True)
    slots = tuple(Slot(device, each.gpu.name, each.gpu.cpus, visible.backend) for device, each in named)
    machine = Machine(
        host=os.uname().nodename,
        allowed_cpus=hardware.cpu.allowed,
        physical_cpus=min(hardware.cpu.physical, hardware.cpu.usable),
        usable_cpus=hardware.cpu.usable,
        numa=tuple(node.cpus for node in hardware.cpu.numa),
        slots=slots,
        slots_source=visible.source,
        bound=len(hardware.cpu.allowed) < (os.cpu_count() or 1),
        variables=visible.environ,
        masks=alone(visible, environ) if masked else (),
    )
    return machine, (*hardware.notes, *visible.notes)
