"""OpenPAI."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.openpai import find
from ddplaunch.errors import UsageError

TASK = {
    "PAI_JOB_NAME": "admin~train",
    "PAI_TASK_ROLE_COUNT": "1",
    "PAI_TASK_ROLE_LIST": "worker",
    "PAI_TASK_ROLE_TASK_COUNT_worker": "2",
    "PAI_HOST_IP_worker_0": "10.0.0.4",
    "PAI_HOST_IP_worker_1": "10.0.0.5",
    "PAI_CURRENT_TASK_ROLE_NAME": "worker",
    "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "1",
}


def test_a_task_of_one_role() -> None:
    finding = find(TASK)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address, finding.run_id) == (2, 1, "10.0.0.4", "admin~train")
    assert finding.port


def test_of_several_roles_nothing_says_what_belongs_together() -> None:
    with pytest.raises(UsageError, match="counts within worker, but the job has 2 task roles: ps, worker"):
        find({**TASK, "PAI_TASK_ROLE_LIST": "ps,worker"})


def test_one_task_needs_no_address() -> None:
    alone = {"PAI_TASK_ROLE_TASK_COUNT_worker": "1", "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": "0"}
    finding = find({**TASK, **alone, "PAI_HOST_IP_worker_0": ""})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (1, 0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PAI_HOST_IP_worker_0": ""}, "PAI_HOST_IP_worker_0 is not set"),
        ({"PAI_TASK_ROLE_TASK_COUNT_worker": "1"}, "CURRENT_TASK_INDEX=1 and PAI_TASK_ROLE_TASK_COUNT_worker=1 contra"),
    ],
)
def test_what_cannot_be(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find({**TASK, **changed})
