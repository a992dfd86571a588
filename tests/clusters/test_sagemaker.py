"""Amazon SageMaker."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.sagemaker import find
from ddplaunch.errors import UsageError

HOST = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "TRAINING_JOB_NAME": "my-training",
}


def test_a_host() -> None:
    finding = find(HOST)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.nproc) == (2, 1, "algo-1", "8")
    assert finding.run_id == "my-training"


def test_a_host_without_gpus() -> None:
    finding = find({**HOST, "SM_NUM_GPUS": "0"})
    assert finding
    assert finding.nproc is None


@pytest.mark.parametrize("listed", ["algo-1,algo-2", "[]", "{}", "[1, 2]", "["])
def test_a_list_that_is_none(listed: str) -> None:
    with pytest.raises(UsageError, match="is not a JSON list of hosts"):
        find({**HOST, "SM_HOSTS": listed})


def test_a_host_that_is_not_listed() -> None:
    with pytest.raises(UsageError, match="SM_CURRENT_HOST=algo-3 contradict"):
        find({**HOST, "SM_CURRENT_HOST": "algo-3"})
