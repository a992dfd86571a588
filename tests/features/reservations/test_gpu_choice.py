"""Tests of the choice among free GPUs."""

import pytest

from ddplaunch.features.reservations.gpu_choice import choose_neighbours

PAIRS = {(one, other): 0 if (one, other) in {(0, 3), (1, 2)} else 40 for one in range(4) for other in range(one + 1, 4)}
TWO_NODES = {(one, other): 40 if one // 4 == other // 4 else 50 for one in range(8) for other in range(one + 1, 8)}


@pytest.mark.parametrize(
    ("free", "count", "distances", "chosen"),
    [
        ([0, 1, 2, 3], 2, PAIRS, (0, 3)),
        ([1, 2, 3], 2, PAIRS, (1, 2)),
        ([0, 1, 2], 1, PAIRS, (0,)),  # the pair of 1 and 2 stays whole
        ([0, 1, 3], 1, PAIRS, (1,)),
        ([0, 1, 2, 3], 3, PAIRS, (0, 1, 2)),
        ([2, 3, 4, 5, 6], 3, TWO_NODES, (4, 5, 6)),
        ([0, 1, 2, 5, 6], 2, TWO_NODES, (5, 6)),  # three of the other node stay together
        ([3, 5], 2, TWO_NODES, (3, 5)),
        ([3, 5], 3, TWO_NODES, None),
        ([4, 7], 1, {}, (4,)),
        ([*range(16)], 8, {}, tuple(range(8))),
    ],
)
def test_neighbours_first(free, count, distances, chosen):
    assert choose_neighbours(free, count, distances) == chosen
