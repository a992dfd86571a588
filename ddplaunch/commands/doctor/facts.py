"""What one machine says of itself, check by check: plain data. Sizes are bytes, None is not known."""

from __future__ import annotations

from typing import Any

from ddplaunch import __version__
from ddplaunch.commands.doctor.checks import (
    CheckContext,
    Findings,
    HealthCheck,
    KernelNumber,
    fabric,
    folders,
    gpus,
    kernel,
    network,
    torch,
)
from ddplaunch.commands.doctor.checks.fabric import Fabric
from ddplaunch.commands.doctor.checks.folders import JobFolder
from ddplaunch.commands.doctor.checks.kernel import ProcessLimits
from ddplaunch.commands.doctor.checks.network import RouteToNodeZero
from ddplaunch.commands.doctor.checks.torch import TorchInfo
from ddplaunch.control.route import machine_id
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.gpu_health import GpuHealth
from ddplaunch.errors import host_name
from ddplaunch.plan.hardware import LostGpu
from ddplaunch.wire.bounds import Count, NonNegativeFloat, TextLine

CHECKS: tuple[HealthCheck, ...] = (torch.CHECK, gpus.CHECK, folders.CHECK, kernel.CHECK, fabric.CHECK, network.CHECK)
"""In the order of their findings."""


@dataclass(frozen=True)
class NodeFacts:
    """One machine."""

    host: TextLine
    ddplaunch: TextLine
    python: TextLine
    kernel: TextLine
    torch: TorchInfo | None
    torch_error: TextLine | None  # why there is no torch to speak of
    gpus: tuple[GpuHealth, ...]
    gpus_error: TextLine | None  # why GPUs that are there cannot be used, or asked
    lost_gpus: tuple[LostGpu, ...]
    folders: tuple[JobFolder, ...]
    limits: ProcessLimits
    memory_total: KernelNumber | None  # of the machine, or of the control group, which may have less
    memory_available: KernelNumber | None
    cpus: Count  # that this process may run on
    quota: NonNegativeFloat | None  # the CPUs whose time the control group may use
    load: NonNegativeFloat  # processes that want a CPU, over the last minute
    infiniband: tuple[TextLine, ...]
    link: RouteToNodeZero | None
    link_error: TextLine | None  # why node 0's address leads nowhere
    loopback: TextLine | None  # why this machine cannot connect to itself
    clock_synchronised: bool | None
    fabric: Fabric | None = None
    cannot_start: tuple[TextLine, TextLine] | None = None  # why no rank can be started, and the remedy
    machine: TextLine = ""  # equal for two names of one machine; "" where that is not known


def read_facts(where: CheckContext) -> NodeFacts:
    """Look at this machine: begin all checks, then wait for each."""
    readings = [check.read(where) for check in CHECKS]
    found: dict[str, Any] = {name: value for reading in readings for name, value in reading().items()}
    return NodeFacts(host=host_name(), ddplaunch=__version__, machine=machine_id(), **found)


def machine_findings(name: str, facts: NodeFacts) -> Findings:
    """What is wrong with one machine, whatever the others are."""
    for check in CHECKS:
        yield from check.findings(name, facts)
