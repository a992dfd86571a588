"""Volcano's env and svc plugins."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.volcano import find
from ddplaunch.errors import UsageError
from tests.clusters.samples import KUBERNETES

POD = {
    **KUBERNETES,
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_MY_NODES_HOSTS": "job-my-nodes-0.job,job-my-nodes-1.job",
    "VC_MY_NODES_NUM": "2",
}


@pytest.mark.parametrize("left", ["VC_TASK_INDEX", "VK_TASK_INDEX"])
def test_a_pod_of_one_task(left: str) -> None:
    finding = find({**POD, left: ""})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (2, 1, None)
    assert (finding.address, finding.address_comes_late) == ("job-my-nodes-0.job", True)


def test_without_hosts_a_pod_is_a_job_of_its_own() -> None:
    finding = find({**POD, "VC_MY_NODES_HOSTS": ""})
    assert finding
    assert (finding.nnodes, finding.node_rank) == (1, 0)
    assert "VC_TASK_INDEX=1 without VC_…_HOSTS" in finding.notes[0]


def test_any_other_pod() -> None:
    assert find(KUBERNETES) is None


def test_of_several_tasks_nothing_says_which() -> None:
    several = {**POD, "VC_MASTER_HOSTS": "job-master-0.job", "VC_MASTER_NUM": "1"}
    with pytest.raises(UsageError, match="but the job has 2: VC_MASTER_HOSTS, VC_MY_NODES_HOSTS") as raised:
        find(several)
    assert "--nnodes 3 --node-rank … --master-addr job-master-0.job" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"VK_TASK_INDEX": "0"}, "VC_TASK_INDEX=1 and VK_TASK_INDEX=0 contradict"),
        ({"VC_TASK_INDEX": "2", "VK_TASK_INDEX": "2"}, "VC_TASK_INDEX=2 and hosts in VC_MY_NODES_HOSTS=2 contradict"),
        ({"VC_MY_NODES_NUM": "3"}, r"VC_MY_NODES_NUM=3 and VC_MY_NODES_HOSTS=\S+ \(nodes: 2\) contradict"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**POD, **changed})
