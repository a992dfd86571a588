"""All checks of one machine: reads its facts, and yields the findings on them."""

from __future__ import annotations

from typing import Any

from ddplaunch import __version__
from ddplaunch.base.errors import host_name
from ddplaunch.features.doctor.checks import CheckContext, Findings, HealthCheck, folders, gpus, kernel, network, torch
from ddplaunch.features.doctor.node_facts import NodeFacts
from ddplaunch.system.network.addresses import machine_id

CHECKS: tuple[HealthCheck, ...] = (torch.CHECK, gpus.CHECK, folders.CHECK, kernel.CHECK, network.CHECK)
"""All checks, in the order of their findings."""


def read_facts(context: CheckContext) -> NodeFacts:
    """Collect the facts of this machine: start all checks, then wait for each."""
    readers = [check.read(context) for check in CHECKS]
    found: dict[str, Any] = {name: value for reader in readers for name, value in reader().items()}
    return NodeFacts(host=host_name(), ddplaunch=__version__, machine=machine_id(), **found)


def machine_findings(name: str, facts: NodeFacts) -> Findings:
    """Yield the findings on one machine, independent of other machines."""
    for check in CHECKS:
        yield from check.findings(name, facts)
