"""MVAPICH 2, and 3 and later."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.mvapich import find
from ddplaunch.errors import UsageError


def task(prefix: str, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    counts = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"{prefix}_COMM_WORLD_{name}": str(count) for name, count in counts.items()}


def test_nothing_without_it() -> None:
    assert find({"MV2_ENABLE_AFFINITY": "0"}) is None


@pytest.mark.parametrize("prefix", ["MV2", "MVP"])
def test_ranks_and_nodes(prefix: str) -> None:
    finding = find(task(prefix, 3, 4, 1, 2))
    assert finding
    assert finding.place == Place(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert finding.variables[0] == f"{prefix}_COMM_WORLD_RANK"
    node = find(task(prefix, 3, 4, 0, 1))
    assert node
    assert (node.nnodes, node.node_rank, node.place) == (4, 3, None)


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(UsageError, match="MV2_COMM_WORLD_LOCAL_RANK is not set"):
        find({**task("MV2", 3, 4, 1, 2), "MV2_COMM_WORLD_LOCAL_RANK": ""})
