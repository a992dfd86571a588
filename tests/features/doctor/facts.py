"""The facts of a machine without problems, and the findings about machines, for tests that change a part of them."""

from typing import Any

from ddplaunch.features.doctor.examination import DoctorResults, ExaminedNode
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.node_facts import NodeFacts, ProcessLimits, RouteToNodeZero, TorchInfo

GIB = 1 << 30

FACTS = NodeFacts(
    host="n0",
    ddplaunch="0.1.0",
    python="3.11.7",
    kernel="6.18",
    torch=TorchInfo("2.13.0", cuda=None, nccl=None, devices=0),
    torch_error=None,
    gpus=(),
    gpus_error=None,
    lost_gpus=(),
    folders=(),
    limits=ProcessLimits(memlock=None, open_files=None, processes=None, processes_left=None),
    memory_total=16 * GIB,
    memory_available=8 * GIB,
    cpus=2,
    quota=None,
    load=0.5,
    infiniband=(),
    link=RouteToNodeZero("10.0.0.1", "eth0", 1500),
    link_error=None,
    loopback=None,
    clock_synchronised=None,
)


def describe_findings(*facts: NodeFacts | None, **results: Any) -> list[str]:
    """Return the findings about nodes n0, n1, … with these facts (None: unknown) and ``results`` of the examination."""
    nodes = tuple(ExaminedNode(f"n{node}", each) for node, each in enumerate(facts))
    found = DoctorResults(nodes, (29500, 29501), **results)
    return [f"{each.severity.value} {each.subject}: {each.text}" for each in find_all(found)]
