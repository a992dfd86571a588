"""TF_CONFIG and CLUSTER_SPEC."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddplaunch.clusters.tfconfig import find
from ddplaunch.errors import UsageError


def spec(role: str, index: int, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})


CHIEF = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}
POOLS = {"workerpool0": ["p0-0:2222"], "workerpool1": ["p1-0:2222", "p1-1:2222"], "workerpool2": ["p2-0:2222"]}
NODE = {"TF_CONFIG": spec("worker", 1, **CHIEF)}


@pytest.mark.parametrize(
    ("name", "written", "node_rank", "address"),
    [
        ("TF_CONFIG", spec("chief", 0, **CHIEF), 0, "a"),
        ("TF_CONFIG", spec("worker", 1, **CHIEF), 2, "a"),
        ("TF_CONFIG", spec("worker", 2, worker=["[fd77::10]:2222", "b:2222", "c:2222"]), 2, "fd77::10"),
        ("CLUSTER_SPEC", spec("workerpool0", 0, **POOLS), 0, "p0-0"),
        ("CLUSTER_SPEC", spec("workerpool1", 1, **POOLS), 2, "p0-0"),
    ],
)
def test_a_node_of_three(name: str, written: str, node_rank: int, address: str) -> None:
    finding = find({name: written})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.port) == (3, node_rank, address, 2222)
    assert finding.variables == (name,)


@pytest.mark.parametrize("written", [spec("ps", 0, **CHIEF), spec("evaluator", 0, **CHIEF), spec("worker", 2, **CHIEF)])
def test_a_node_without_ranks_is_refused(written: str) -> None:
    with pytest.raises(UsageError, match=r"TF_CONFIG: this is (ps 0|evaluator 0|worker 2), not one of the 3 nodes"):
        find({"TF_CONFIG": written})


@pytest.mark.parametrize("written", ["{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_without_a_cluster_it_says_nothing(written: str) -> None:
    assert find({"TF_CONFIG": written}) is None


@pytest.mark.parametrize("written", ["x", "[]", '{"cluster": {"worker": ["a:1"]}}', '{"cluster": {"worker": ["a"]}}'])
def test_what_it_cannot_be(written: Any) -> None:
    with pytest.raises(UsageError, match="does not describe a cluster"):
        find({"TF_CONFIG": written})
