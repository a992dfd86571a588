"""submitit's local executor."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.submitit import find
from ddplaunch.errors import UsageError

TASK = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}


def test_a_task() -> None:
    finding = find(TASK)
    assert finding
    assert finding.place == Place(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert (finding.nnodes, finding.address, finding.run_id) == (1, "127.0.0.1", "4711")


def test_one_task_is_a_node() -> None:
    alone = {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"}
    finding = find({**TASK, **alone})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (1, 0, None)


@pytest.mark.parametrize("executor", ["slurm", "debug"])
def test_its_other_executors_are_not_its_to_tell(executor: str) -> None:
    assert find({**TASK, "SUBMITIT_EXECUTOR": executor}) is None


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(UsageError, match="SUBMITIT_LOCAL_NTASKS is not set"):
        find({**TASK, "SUBMITIT_LOCAL_NTASKS": ""})
