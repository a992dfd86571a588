"""Flux."""

from __future__ import annotations

import pytest

from ddplaunch.clusters.finding import Place
from ddplaunch.clusters.flux import find
from ddplaunch.errors import UsageError

TASK = {
    "FLUX_JOB_ID": "f2WzFTu3ry1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}


def test_a_rank() -> None:
    finding = find(TASK)
    assert finding
    assert finding.place == Place(rank=3, world_size=4, local_rank=1, local_world_size=None)
    assert (finding.nnodes, finding.node_rank, finding.run_id) == (2, None, "f2WzFTu3ry1")


def test_as_many_tasks_as_nodes_is_a_node() -> None:
    finding = find({**TASK, "FLUX_JOB_NNODES": "4", "FLUX_TASK_LOCAL_ID": "0"})
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (4, 3, None)


def test_all_on_one_node() -> None:
    finding = find({**TASK, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"})
    assert finding
    assert finding.place == Place(3, 4, 3, 4)
    assert (finding.nnodes, finding.node_rank, finding.address) == (1, 0, "127.0.0.1")


def test_a_batch_script_of_flux_is_no_task() -> None:
    assert find({"FLUX_URI": "local:///tmp/flux-x/local-0", "FLUX_ENCLOSING_ID": "f2WzFTu3ry1"}) is None


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(UsageError, match="FLUX_JOB_NNODES is not set"):
        find({**TASK, "FLUX_JOB_NNODES": ""})
