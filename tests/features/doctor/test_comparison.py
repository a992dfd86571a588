"""Tests of comparing the facts of several nodes, with made-up facts."""

import itertools

import pytest
from msgspec.structs import replace

from ddplaunch.features.doctor.examination import (
    CollectiveResult,
    DoctorResults,
    ExaminedNode,
    PathResult,
    round_robin_pairs,
)
from ddplaunch.features.doctor.findings import find_all
from ddplaunch.features.doctor.flows import Flow
from ddplaunch.features.doctor.node_facts import RouteToNodeZero
from tests.features.doctor.facts import FACTS
from tests.features.doctor.findings import ITSELF

FAST, SLOW = (1e-4, 1e-3, 1e-2), (1e-4, 1e-2, 1e-1)


def examined(count, *, slow=(), broken=()):
    pairs = list(itertools.combinations(range(count), 2))
    return DoctorResults(
        tuple(ExaminedNode(f"n{node}") for node in range(count)),
        (29500, 29501),
        ways=tuple(
            PathResult(a, b, port, "silent" if (a, b) in broken else "ok", None)
            for a, b in itertools.permutations(range(count), 2)
            for port in (29500, 29501, 0)
        ),
        speeds=tuple(CollectiveResult(pair, 2, "gloo", SLOW if pair in slow else FAST) for pair in pairs),
    )


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ([], []),
        ([(0, 1)], ["n0 and n1"]),
        ([(0, 2), (1, 2), (2, 3)], ["n2"]),
        ([(0, 2), (1, 2), (2, 3), (0, 1)], ["n2", "n0 and n1"]),
    ],
)
def test_a_slow_node_is_named_rather_than_its_links(slow, named):
    assert [each.subject for each in find_all(examined(4, slow=slow))] == named


def blocked(way: PathResult) -> PathResult:
    return replace(way, outcome="silent") if 2 in (way.source, way.target) and way.port == 29500 else way


def test_a_blocked_port_and_lost_packets_are_two_findings():
    """The paths of the node that loses packets are left out, so the other finding is not split."""
    found = examined(4)
    lossy = tuple(Flow(1, other, 10_000, seconds=1e-4, sent=301, lost=30, rate=8e8) for other in (0, 2, 3))
    result = find_all(replace(found, ways=tuple(map(blocked, found.ways)), flows=lossy))
    assert [(each.subject, each.text) for each in result if "packets" not in each.text] == [
        ("n2", "port 29500 is blocked in both directions"),
    ]


@pytest.mark.parametrize("broken", [[(1, 0)], [(0, 1), (2, 1)]])
def test_a_wrong_address_of_node_0_brings_no_second_finding_about_a_firewall(broken):
    found = examined(3, broken=broken)
    astray = ExaminedNode("n1", replace(FACTS, host="n1", link=RouteToNodeZero("127.0.0.1", "lo", 65536)))
    result = find_all(replace(found, nodes=(found.nodes[0], astray, found.nodes[2])))
    assert [each.subject for each in result if "firewall" in (each.hint or "")] == []
    assert f"{ITSELF} (127.0.0.1)" in [each.text for each in result]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ([(0, 1)], ["n0 to n1"]),
        ([(0, 2), (1, 2), (3, 2)], ["n0, n1 and n3 to n2"]),
        ([(2, 0), (2, 1), (2, 3)], ["n2 to n0, n1 and n3"]),
        ([(2, 0), (2, 1), (2, 3), (0, 2), (1, 2), (3, 2)], ["n2"]),
    ],
)
def test_broken_ways_are_put_together(broken, named):
    found = find_all(examined(4, broken=broken))
    assert [each.subject for each in found] == named
    assert all(each.text.startswith("a connection gets no answer") for each in found)


@pytest.mark.parametrize("count", range(2, 9))
def test_all_of_few_nodes_meet_each_in_one_pair_at_a_time(count):
    found = round_robin_pairs(range(count), 7)
    assert sorted(pair for each in found for pair in each) == list(itertools.combinations(range(count), 2))
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in found)
