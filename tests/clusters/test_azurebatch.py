"""Azure Batch."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.azurebatch import find
from ddplaunch.errors import UsageError

TASK = {
    "AZ_BATCH_JOB_ID": "batchjob001",
    "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5",
    "AZ_BATCH_IS_CURRENT_NODE_MASTER": "true",
}


def test_the_command_of_the_primary_node_is_a_script() -> None:
    finding = find(TASK)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.is_script) == (1, 0, True)
    assert "runs on one of its 2 hosts; to use all: mpirun" in finding.notes[0]


def test_a_subtask_is_refused() -> None:
    with pytest.raises(UsageError, match="this is a subtask of one on 2 hosts") as raised:
        find({**TASK, "AZ_BATCH_IS_CURRENT_NODE_MASTER": "false"})
    assert "--nnodes 2 --node-rank I --master-addr 10.0.0.4" in str(raised.value.hint)


def test_any_other_task() -> None:
    assert find({"AZ_BATCH_JOB_ID": "batchjob001", "AZ_BATCH_NODE_ID": "tvm-1"}) is None
