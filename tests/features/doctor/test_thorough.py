"""Tests of the findings of ``ddplaunch doctor --thorough``, with made-up facts."""

from ddplaunch.features.doctor.examination import CollectiveResult, DoctorResults, ExaminedNode, Rail
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.report import format_report
from tests.features.doctor.facts import FACTS


def describe_findings(*nodes, **more):
    found = DoctorResults(tuple(ExaminedNode(f"n{number}", *node) for number, node in enumerate(nodes)), (), **more)
    return [f"{each.severity.value} {each.subject}: {each.text}" for each in find_all(found)]


def test_what_is_slow_or_fails_only_on_all_nodes_at_once():
    fast, slow = (1e-4, 1e-3, 1e-2), (1e-4, 1e-2, 1e-1, 0.4)
    pairs = tuple(CollectiveResult(nodes, 2, "gloo", fast) for nodes in ((0, 1), (0, 2), (1, 2)))
    all_of_them = (0, 1, 2)
    together = (
        CollectiveResult(all_of_them, 3, "gloo", slow),
        CollectiveResult(all_of_them, 3, "gloo", (), "gloo timed out", "all_gather"),
        CollectiveResult(all_of_them, 3, "gloo", (), "ProcessGroupGloo does not support it", "reduce_scatter"),
    )
    rail = Rail("10.8.0.0/24", {0: "eth1", 1: "eth1"}, {}, ((0, 1, "ok"), (1, 0, "silent")))
    assert describe_findings([FACTS], [FACTS], [FACTS], speeds=pairs, together=together, rails=(rail,)) == [
        "error all nodes at once: all_gather failed (gloo): gloo timed out",
        "warning all nodes at once: all_reduce runs at 213 MiB/s; the slowest pair at 1.6 GiB/s",
        "warning n1 to n0: a connection over 10.8.0.0/24 (eth1) gets no answer",
    ]
    nodes = tuple(ExaminedNode(f"n{each}") for each in range(3))
    shown = format_report(DoctorResults(nodes, (), together=together), [], 1.0)
    assert shown.endswith("""
all nodes at once, 3 ranks
                           4 B takes   bus bandwidth
  all_reduce (gloo)           100 us   213 MiB/s at 64 MiB
  all_gather (gloo)       failed: gloo timed out
  reduce_scatter (gloo)   not with gloo of this torch
""")
