"""Kubeflow's two kinds of jobs."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.kubeflow import find
from ddplaunch.errors import UsageError
from tests.clusters.samples import KUBERNETES, PYTORCHJOB, PYTORCHJOB_OLD, TRAINJOB


def test_a_trainjob() -> None:
    finding = find(TRAINJOB)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc, finding.place) == (3, 1, "auto", None)
    assert (finding.address, finding.port) == ("job-node-0-0.job", 29500)


@pytest.mark.parametrize("environ", [PYTORCHJOB_OLD, PYTORCHJOB])
def test_the_rank_of_a_pytorchjob_is_the_pods_index(environ: dict[str, str]) -> None:
    finding = find(environ)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (2, 1, None)
    assert (finding.address, finding.port) == ("job-master-0", 23456)
    assert finding.nproc == environ.get("PET_NPROC_PER_NODE")


def test_any_other_pod() -> None:
    assert find(KUBERNETES) is None
    assert find({**PYTORCHJOB_OLD, "LOCAL_RANK": "0"}) is None
    assert find({name: value for name, value in PYTORCHJOB_OLD.items() if name not in KUBERNETES}) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PET_NNODES": "1:3"}, "PET_NNODES=1:3: the pods of an elastic job"),
        ({"PET_NNODES": "two"}, "PET_NNODES=two is not a number"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK=3 and PET_NNODES=3 contradict"),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many is not a number"),
        ({"PET_MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**TRAINJOB, **changed})


def test_a_range_of_one_is_a_number() -> None:
    finding = find({**TRAINJOB, "PET_NNODES": "3:3"})
    assert finding
    assert finding.nnodes == 3
