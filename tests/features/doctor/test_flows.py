"""Tests of the findings about connections between nodes, with made-up figures."""

import itertools

import pytest
from msgspec.structs import replace

from ddplaunch.features.doctor.examination import PathResult
from ddplaunch.features.doctor.flows import Flow, nodes_to_skip
from tests.features.doctor.facts import describe_findings
from tests.features.doctor.findings import LARGE_LOST, TOO_FAR

SOUND = Flow(0, 1, 10_000, seconds=1e-4, sent=301, lost=0, rate=8e8)
LOSSY = replace(SOUND, sent=1020, lost=31, rate=None)
FAR = replace(SOUND, seconds=0.1)
SLOW = replace(SOUND, rate=1.2e6)


def describe_paths(flows, count=4, ways=()):
    return describe_findings(*[None] * count, ways=ways, flows=flows)


def flows(count, faulty):
    """Return the flows between ``count`` nodes; ``faulty``: those with faults."""
    pairs = itertools.permutations(range(count), 2)
    return tuple(replace(faulty.get(pair, SOUND), source=pair[0], target=pair[1]) for pair in pairs)


@pytest.mark.parametrize(
    ("flow", "text"),
    [
        (SOUND, None),
        (replace(SOUND, claimed=None, rate=12.5e6), None),
        (replace(SOUND, sent=1000, lost=4), None),
        (replace(SOUND, sent=40, lost=2), None),
        (replace(SOUND, seconds=0.005), None),
        (LOSSY, "error n0 to n1: packets are lost: 3.0 % (31 of 1020)"),
        (replace(LOSSY, sent=300, lost=3), "error n0 to n1: packets are lost: 1.0 % (3 of 300)"),
        (replace(LOSSY, sent=100, lost=10), "error n0 to n1: packets are lost: 10 % (10 of 100)"),
        (replace(LOSSY, seconds=None, sent=6, lost=6), "error n0 to n1: packets are lost: 100 % (6 of 6)"),
        (replace(LOSSY, large=False, seconds=0.1), "error n0 to n1: packets are lost: 3.0 % (31 of 1020)"),
        (replace(SOUND, large=False, rate=None), f"error n0 to n1: {LARGE_LOST}"),
        (FAR, f"error n0 to n1: round-trip time is 100 ms; {TOO_FAR}"),
        (replace(FAR, rate=3e7), f"error n0 to n1: round-trip time is 100 ms; {TOO_FAR}"),
        (SLOW, "error n0 to n1: throughput is 9.6 Mbit/s; the interface reports 10000 Mbit/s"),
        (
            replace(SLOW, claimed=None),
            "error n0 to n1: throughput is 9.6 Mbit/s; expected 1000 Mbit/s or more in a data center",
        ),
        (replace(SLOW, rate=6e7), "warning n0 to n1: throughput is 480 Mbit/s; the interface reports 10000 Mbit/s"),
        (replace(SOUND, claimed=400_000, rate=1.25e8), None),
    ],
)
def test_the_path_of_a_flow_is_described(flow, text):
    assert describe_paths((flow,), 2) == ([text] if text else [])


def test_latency_and_bandwidth_are_two_findings():
    assert FAR.faults == ("far",)
    assert replace(SLOW, seconds=0.1).faults == ("far", "slow")


@pytest.mark.parametrize(
    ("count", "pairs", "named"),
    [
        (2, [(0, 1), (1, 0)], ["n0 and n1"]),
        (2, [(1, 0)], ["n1 to n0"]),
        (3, [(0, 2), (2, 0), (1, 2), (2, 1)], ["n2"]),
        (3, [(0, 2), (2, 1)], ["n2"]),
        (4, [(0, 1), (1, 0), (2, 3)], ["n0 and n1", "n2 to n3"]),
        (4, [*itertools.permutations(range(4), 2)], ["any two nodes"]),
        (5, [pair for pair in itertools.permutations(range(5), 2) if {3, 4}.intersection(pair)], ["n3", "n4"]),
    ],
)
def test_the_node_is_named_rather_than_its_ways(count, pairs, named):
    found = describe_paths(flows(count, dict.fromkeys(pairs, SLOW)), count)
    assert [each.partition(":")[0].removeprefix("error ") for each in found] == named


def test_of_many_ways_a_few_are_named():
    pairs = [(node, node + 1) for node in range(0, 12, 2)]
    found = describe_paths(flows(12, dict.fromkeys(pairs, LOSSY)), 12)
    few = ["error n0 to n1", "error n2 to n3", "error n4 to n5", "error 3 more paths"]
    assert [each.partition(":")[0] for each in found] == few


def test_the_losses_of_all_paths_of_a_node_are_summed():
    """A busy node may send five packets on one path in the time of a thousand on another."""
    few, many = replace(SOUND, sent=5, lost=3), replace(SOUND, sent=1000, lost=107)
    found = describe_paths(flows(3, {(1, 0): few, (0, 1): many, (1, 2): few, (2, 1): many}), 3)
    assert found == ["error n1: packets are lost: 11 % (220 of 2010)"]


def test_effects_of_loss_are_not_reported():
    ways = (PathResult(0, 1, 29500, "silent", None), PathResult(1, 0, 29501, "stranger", None))
    assert describe_paths((LOSSY,), 2, ways) == ["error n0 to n1: packets are lost: 3.0 % (31 of 1020)"]


def test_nodes_to_skip_are_those_that_are_faulty_with_all_others():
    assert nodes_to_skip(flows(2, {(0, 1): LOSSY})) == set()
    met = [each for each in flows(5, {(0, 4): LOSSY, (4, 1): SLOW}) if set(each.pair) != {2, 4} != set(each.pair)]
    assert nodes_to_skip([each for each in met if each.pair not in ((3, 4), (4, 3))]) == {4}
    assert nodes_to_skip(flows(4, dict.fromkeys(itertools.permutations(range(4), 2), FAR))) == {0, 1, 2, 3}
