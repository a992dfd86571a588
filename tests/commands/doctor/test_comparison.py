"""Who is named when several nodes are compared; what several machines would be needed for is in test_hosts.py."""

from __future__ import annotations

import itertools

import pytest

from ddplaunch.commands.doctor.comparison import findings
from ddplaunch.commands.doctor.examination import Examination, NodeFound, Speed, Way, rounds

FAST, SLOW = (1e-4, 1e-3, 1e-2), (1e-4, 1e-2, 1e-1)


def examined(count, *, slow=(), broken=()):
    pairs = list(itertools.combinations(range(count), 2))
    return Examination(
        tuple(NodeFound(f"n{node}") for node in range(count)),
        (29500, 29501),
        ways=tuple(
            Way(a, b, port, "silent" if (a, b) in broken else "ok", None)
            for a, b in itertools.permutations(range(count), 2)
            for port in (29500, 29501, 0)
        ),
        speeds=tuple(Speed(pair, 2, "gloo", SLOW if pair in slow else FAST) for pair in pairs),
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
    assert [each.subject for each in findings(examined(4, slow=slow))] == named


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ([(0, 1)], ["n0 to n1"]),
        ([(0, 2), (1, 2), (3, 2)], ["n0, n1 and n3 to n2"]),
        ([(2, 0), (2, 1), (2, 3)], ["n2 to n0, n1 and n3"]),
    ],
)
def test_broken_ways_are_put_together(broken, named):
    found = findings(examined(4, broken=broken))
    assert [each.subject for each in found] == named
    assert {each.text for each in found} == {"a connection gets no answer"}


@pytest.mark.parametrize("count", range(2, 9))
def test_all_of_few_nodes_meet_each_in_one_pair_at_a_time(count):
    found = rounds(range(count), 7)
    assert sorted(pair for each in found for pair in each) == list(itertools.combinations(range(count), 2))
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in found)
