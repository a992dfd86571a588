"""Tests of reading what srun prints about tasks on the nodes that are left."""

import pytest

from ddplaunch.features.slurm_step.node import parse_listpids

HEAD = "PID      JOBID    STEPID   LOCALID GLOBALID\n"
TASK, CHILD = (f"43       7        0        {ids}       \n" for ids in ("0        2", "-        -"))
NONE = "StepId=7.0 does not exist on node (null).\n"


@pytest.mark.parametrize(
    ("listed", "count", "alive"),
    [
        (f"0: {HEAD}0: {TASK}0: {CHILD}", 1, {2}),
        (f"1: {NONE}0: {HEAD}0: {TASK}", 2, {2}),
        (f"0: {HEAD}0: {NONE}", 1, set()),
        (f"0: {HEAD}", 2, None),  # not all nodes have answered
        ("srun: error: Unable to create step for job 7: Access denied\n", 1, None),
        ("", 1, None),
    ],
)
def test_which_tasks_are_alive(listed, count, alive):
    assert parse_listpids(listed, count) == alive
