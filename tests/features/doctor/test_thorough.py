"""Tests of the findings of ``ddplaunch doctor --thorough``, with made-up facts."""

from __future__ import annotations

import re

from msgspec.structs import replace

from ddplaunch.features.doctor.checks.fabric import ErrorCount, Fabric, IbPort, read_fabric
from ddplaunch.features.doctor.examination import CollectiveResult, DoctorResults, ExaminedNode, Rail
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.report import format_report
from tests.conftest import write_program
from tests.features.doctor.facts import FACTS
from tests.features.doctor.findings import SINCE

LOG = """\
6,339,5140900,-;NET: Registered PF_INET6 protocol family
 SUBSYSTEM=net
4,901,61000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,902,62000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid=4711, GPU has fallen off the bus.
4,903,63000000,-;NVRM: Xid (PCI:0000:10:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000.
4,904,-,garbled;NVRM: Xid (PCI:zz): 79
NVRM: Xid (PCI:0000:18:00): 79
"""


def port(folder, device, state="4: ACTIVE", physical="5: LinkUp", rate="400 Gb/sec (4X NDR)", **counters):
    place = folder / "class" / "infiniband" / device / "ports" / "1"
    for name, value in {"state": state, "phys_state": physical, "rate": rate}.items():
        write_program(place, name, f"{value}\n")
    for name in ("symbol_error", "link_downed", "port_rcv_errors"):
        write_program(place / "counters", name, f"{counters.get(name, 0)}\n")


def describe_findings(*nodes, **more):
    found = DoctorResults(tuple(ExaminedNode(f"n{number}", *node) for number, node in enumerate(nodes)), (), **more)
    return [f"{each.severity.value} {each.subject}: {each.text}" for each in find_all(found)]


def test_ports_and_xids(tmp_path):
    port(tmp_path, "mlx5_0", symbol_error=7, link_downed=2)
    port(tmp_path, "mlx5_1", state="2: INIT", rate="10 Gb/sec (4X SDR)")
    port(tmp_path, "mlx5_2", state="1: DOWN", physical="2: Polling")
    (tmp_path / "class" / "infiniband" / "mlx5_3").mkdir()
    log = write_program(tmp_path, "kmsg", LOG)
    fabric = read_fabric(str(tmp_path), str(log))
    found = describe_findings([replace(FACTS, fabric=fabric)])
    assert [re.sub(r"\S+ ago", "T ago", each) for each in found] == [
        "warning n0: mlx5_1 port 1 waits for a subnet manager (INIT)",
        "warning n0 GPU at 0000:18:00: Xid 79 (it fell off its bus) 2 times, last T ago (kernel log)",
        "note n0: mlx5_2 port 1 is not active: DOWN (Polling)",
        f"note n0 mlx5_0 port 1: 7 symbol errors, 2 times that the link went down {SINCE}",
        "note n0 GPU at 0000:10:00: Xid 31 (a program used an invalid address) once T ago (kernel log)",
    ]
    assert read_fabric(str(tmp_path / "none"), str(tmp_path / "none")) == replace(fabric, ports=(), errors=(), xids=())


def test_errors_that_came_meanwhile_and_a_port_that_is_slower_than_its_like():
    def fabric(rate, *errors):
        return Fabric((), (IbPort("mlx5_0 port 1", "ACTIVE", "LinkUp", rate),), (), errors, ())

    sound = fabric("400 Gb/sec (4X NDR)")
    slow = fabric("100 Gb/sec (4X EDR)", ErrorCount("mlx5_0 port 1", "symbol errors", 5))
    after = replace(slow, errors=(ErrorCount("mlx5_0 port 1", "symbol errors", 9),))
    nodes = [(replace(FACTS, fabric=sound), None, None, "", {}, sound)]
    assert describe_findings(*nodes * 2) == []
    assert describe_findings(*nodes, (replace(FACTS, fabric=slow), None, None, "", {}, after)) == [
        "warning n1: mlx5_0 port 1 runs at 100 Gb/s, on other nodes at 400",
        "warning n1 mlx5_0 port 1: 4 symbol errors while all_reduce ran",
        f"note n1 mlx5_0 port 1: 5 symbol errors {SINCE}",
    ]


def test_what_is_slow_or_fails_only_on_all_nodes_at_once():
    fast, slow = (1e-4, 1e-3, 1e-2), (1e-4, 1e-2, 1e-1, 0.4)
    pairs = tuple(CollectiveResult(nodes, 2, "gloo", fast) for nodes in ((0, 1), (0, 2), (1, 2)))
    all_of_them = (0, 1, 2)
    together = (
        CollectiveResult(all_of_them, 3, "gloo", slow),
        CollectiveResult(all_of_them, 3, "gloo", (), "gloo timed out", "all_gather"),
        CollectiveResult(
            all_of_them, 3, "gloo", (), "ProcessGroupGloo does not support reduce_scatter", "reduce_scatter"
        ),
    )
    rail = Rail("10.8.0.0/24", {0: "eth1", 1: "eth1"}, {}, ((0, 1, "ok"), (1, 0, "silent")))
    assert describe_findings([FACTS], [FACTS], [FACTS], speeds=pairs, together=together, rails=(rail,)) == [
        "error all nodes at once: all_gather failed (gloo): gloo timed out",
        "warning all nodes at once: all_reduce runs at 213 MiB/s; the slowest pair at 1.6 GiB/s",
        "warning n1 to n0: a connection over 10.8.0.0/24 (eth1) gets no answer",
    ]
    shown = format_report(
        DoctorResults(tuple(ExaminedNode(f"n{each}") for each in range(3)), (), together=together), [], 1.0
    )
    assert shown.endswith("""
all nodes at once, 3 ranks
                           4 B takes   bus bandwidth
  all_reduce (gloo)           100 us   213 MiB/s at 64 MiB
  all_gather (gloo)       failed: gloo timed out
  reduce_scatter (gloo)   not with gloo of this torch
""")
