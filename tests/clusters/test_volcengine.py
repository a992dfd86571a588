"""The machine learning platform of Volcengine."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.volcengine import find
from ddplaunch.errors import UsageError

NODE = {
    "MLP_TASK_ID": "t-20210924211641-nznsh",
    "MLP_ROLE": "WORKER",
    "MLP_ROLE_INDEX": "1",
    "MLP_HOST": "10.128.96.17",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_GPU": "8",
    "MLP_WORKER_ALL_HOSTS": "10.128.97.74,10.128.96.17",
    "MLP_WORKER_0_HOST": "10.128.97.74",
    "MLP_WORKER_0_PORT": "9006",
}


def test_a_worker() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc, finding.place) == (2, 1, "8", None)
    assert (finding.address, finding.port, finding.run_id) == ("10.128.97.74", 9006, "t-20210924211641-nznsh")


def test_a_worker_without_gpus() -> None:
    finding = find({**NODE, "MLP_WORKER_GPU": "0"})
    assert finding
    assert finding.nproc is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MLP_ROLE": "PS"}, "MLP_ROLE=PS: this machine is not one of the workers that MLP_WORKER_NUM=2 counts"),
        ({"MLP_ROLE_INDEX": "2"}, "MLP_ROLE_INDEX=2 and MLP_WORKER_NUM=2 contradict"),
        ({"MLP_WORKER_0_HOST": ""}, "MLP_WORKER_0_HOST is not set"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NODE, **changed})
