"""ModelArts."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.modelarts import find
from ddplaunch.errors import UsageError

NODE = {
    "MA_CURRENT_IP": "192.168.23.38",
    "MA_NUM_GPUS": "8",
    "MA_TASK_NAME": "worker",
    "MA_NUM_HOSTS": "2",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}


def test_a_node() -> None:
    finding = find(NODE)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc, finding.place) == (2, 1, "8", None)
    assert (finding.address, finding.address_comes_late) == ("job-worker-0.job", True)


def test_one_node_has_no_index_that_means_anything() -> None:
    finding = find({"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "0", "VC_TASK_INDEX": "7"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.nproc) == (1, 0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"VC_WORKER_NUM": "3"}, "MA_NUM_HOSTS=2 and VC_WORKER_NUM=3 contradict"),
        ({"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2 and MA_NUM_HOSTS=2 contradict"),
        ({"VC_WORKER_HOSTS": ""}, "VC_WORKER_HOSTS is not set"),
        ({"VC_WORKER_HOSTS": "a.job"}, r"MA_NUM_HOSTS=2 and VC_WORKER_HOSTS=a.job \(nodes: 1\) contradict"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**NODE, **changed})
