"""torch's own variables."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.torch import find
from ddplaunch.errors import UsageError
from tests.clusters.samples import PYTORCHJOB_OLD, TORCHRUN

LEAST = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def test_a_complete_set_is_a_rank() -> None:
    finding = find(LEAST)
    assert finding
    assert finding.place == Place(rank=3, world_size=4, local_rank=1, local_world_size=None)
    assert (finding.nnodes, finding.node_rank, finding.address, finding.port) == (None, None, "n1", 29500)


def test_what_more_is_told() -> None:
    finding = find(TORCHRUN)
    assert finding
    assert finding.place == Place(3, 4, 1, 2)
    assert (finding.nnodes, finding.node_rank) == (2, 1)


def test_all_on_one_node() -> None:
    finding = find({**LEAST, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert finding
    assert (finding.nnodes, finding.node_rank) == (1, 0)


@pytest.mark.parametrize("name", sorted(LEAST))
def test_an_incomplete_set_is_nothing(name: str) -> None:
    assert find({**LEAST, name: ""}) is None


def test_the_rank_of_a_pytorchjob_is_no_process() -> None:
    assert find(PYTORCHJOB_OLD) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 contradict"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4 contradict"),
        ({"MASTER_PORT": "auto"}, "MASTER_PORT=auto is not a number"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**LEAST, **changed})
