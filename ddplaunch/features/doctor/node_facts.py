"""The facts of one machine, collected by all checks: plain data. Sizes are bytes, None is unknown."""

from __future__ import annotations

from typing import Any

from ddplaunch import __version__
from ddplaunch.base.errors import host_name
from ddplaunch.base.types import Count, KernelNumber, NonNegativeFloat, TaggedMessage, TextLine
from ddplaunch.core.net.addresses import machine_id
from ddplaunch.features.doctor.checks import (
    CheckContext,
    Findings,
    HealthCheck,
    fabric,
    folders,
    gpus,
    kernel,
    network,
    torch,
)
from ddplaunch.features.doctor.checks.fabric import Fabric
from ddplaunch.features.doctor.checks.folders import JobFolder
from ddplaunch.features.doctor.checks.kernel import ProcessLimits
from ddplaunch.features.doctor.checks.network import RouteToNodeZero
from ddplaunch.features.doctor.checks.torch import TorchInfo
from ddplaunch.system.devices.gpu_health import GpuHealth
from ddplaunch.system.plan.hardware import LostGpu

CHECKS: tuple[HealthCheck, ...] = (torch.CHECK, gpus.CHECK, folders.CHECK, kernel.CHECK, fabric.CHECK, network.CHECK)
"""All checks, in the order of their findings."""


class NodeFacts(TaggedMessage, frozen=True):
    """Facts of one machine."""

    host: TextLine
    ddplaunch: TextLine
    python: TextLine
    kernel: TextLine
    torch: TorchInfo | None
    torch_error: TextLine | None  # why torch cannot be used
    gpus: tuple[GpuHealth, ...]
    gpus_error: TextLine | None  # why present GPUs cannot be used or queried
    lost_gpus: tuple[LostGpu, ...]
    folders: tuple[JobFolder, ...]
    limits: ProcessLimits
    memory_total: KernelNumber | None  # of the machine, or of the control group, which may have less
    memory_available: KernelNumber | None
    cpus: Count  # on which this process may run
    quota: NonNegativeFloat | None  # CPU time that the control group may use, in CPUs
    load: NonNegativeFloat  # runnable processes, average of the last minute
    infiniband: tuple[TextLine, ...]
    link: RouteToNodeZero | None
    link_error: TextLine | None  # why there is no route to node 0's address
    loopback: TextLine | None  # why this machine cannot connect to itself
    clock_synchronised: bool | None
    fabric: Fabric | None = None
    cannot_start: tuple[TextLine, TextLine] | None = None  # why no rank can be started, and the remedy
    machine: TextLine = ""  # equal for two names of one machine; "" if unknown


def read_facts(context: CheckContext) -> NodeFacts:
    """Collect the facts of this machine: start all checks, then wait for each."""
    readers = [check.read(context) for check in CHECKS]
    found: dict[str, Any] = {name: value for reader in readers for name, value in reader().items()}
    return NodeFacts(host=host_name(), ddplaunch=__version__, machine=machine_id(), **found)


def machine_findings(name: str, facts: NodeFacts) -> Findings:
    """Yield the findings on one machine, independent of the others."""
    for check in CHECKS:
        yield from check.findings(name, facts)
