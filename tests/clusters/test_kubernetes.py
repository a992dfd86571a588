"""Indexed Jobs and JobSets."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.kubernetes import find
from ddplaunch.errors import UsageError
from tests.clusters.samples import KUBERNETES

POD = {
    **KUBERNETES,
    "JOB_COMPLETION_INDEX": "1",
    "DDPLAUNCH_NNODES": "2",
    "MASTER_ADDR": "job-0.job",
    "MASTER_PORT": "29500",
}


def test_a_pod_of_our_job() -> None:
    finding = find(POD)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.port) == (2, 1, "job-0.job", 29500)
    assert finding.address_comes_late


def test_a_pod_of_an_elastic_job() -> None:
    finding = find({**POD, "DDPLAUNCH_NNODES": "2:4", "JOB_COMPLETION_INDEX": "3"})
    assert finding
    assert (finding.min_nodes, finding.nnodes, finding.node_rank) == (2, 4, 3)


def test_one_pod_needs_no_port_and_may_stand_beside_a_service_called_master() -> None:
    finding = find({**POD, "JOB_COMPLETION_INDEX": "0", "DDPLAUNCH_NNODES": "1", "MASTER_PORT": "tcp://10.96.3.1:80"})
    assert finding
    assert (finding.nnodes, finding.port) == (1, None)


def test_a_pod_of_any_indexed_job_is_a_job_of_its_own() -> None:
    finding = find({**KUBERNETES, "JOB_COMPLETION_INDEX": "7"})
    assert finding
    assert (finding.nnodes, finding.node_rank) == (1, 0)
    assert "DDPLAUNCH_NNODES" in finding.notes[0]


def test_any_other_pod() -> None:
    assert find(KUBERNETES) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2 and DDPLAUNCH_NNODES=2 contradict"),
        ({"DDPLAUNCH_NNODES": "x"}, "DDPLAUNCH_NNODES=x is not a number"),
        ({"DDPLAUNCH_NNODES": "4:2"}, "DDPLAUNCH_NNODES=4:2 is not a range like 2:4"),
        ({"DDPLAUNCH_NNODES": "0:2"}, "DDPLAUNCH_NNODES=0:2 is not a range like 2:4"),
        ({"DDPLAUNCH_NNODES": "2:"}, "DDPLAUNCH_NNODES= is not a number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**POD, **changed})
