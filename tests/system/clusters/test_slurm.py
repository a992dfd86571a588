"""Tests of detecting Slurm: steps, batch scripts and interactive jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters.cluster_env import RankAssignment
from ddplaunch.system.clusters.env_builders import FIRST_PORT, PORT_PAIR_COUNT
from ddplaunch.system.clusters.systems.slurm_env import slurm as system
from tests.system.clusters.recorded_environments import SLURM_BATCH, SLURM_TASK, require_detected, slurm_step


def test_nothing_without_slurm() -> None:
    assert system.detect({"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_PROCID": "0"}) is None


STEP_OF_3 = {node: slurm_step("1(x3)", "tux[1-2],gpu07", 3, 3, node, 0, node) for node in (0, 1, 2)}
OF_HET_JOB = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2"}
OWN = os.uname().nodename
ON_OWN = {**SLURM_BATCH, "SLURM_JOB_NODELIST": f"n1,{OWN}"}

RANK_3 = {"rank_assignment": RankAssignment(3, 4, 1, 2), "nnodes": 2, "node_rank": 1, "address": "n1", "run_id": "1.0"}
A_SCRIPT = {"nnodes": 1, "node_rank": 0, "rank_assignment": None, "address": None, "is_batch_script": True}
SRUN = "--nodes=2 --ntasks=2 --ntasks-per-node=1"

FOUND: list[tuple[Mapping[str, str], dict[str, Any], list[str]]] = [
    # several tasks a node are ranks
    (SLURM_TASK, RANK_3, [SRUN]),
    # ``srun bash -c …`` names the job so; other launchers take it for an interactive shell
    *(({**SLURM_TASK, "SLURM_JOB_NAME": name}, RANK_3, [SRUN]) for name in ("bash", "interactive")),
    ({**SLURM_TASK, "SLURM_RESTART_COUNT": "2"}, RANK_3, [SRUN]),
    *(({**SLURM_TASK, "SLURM_DISTRIBUTION": how}, RANK_3, [SRUN]) for how in ("block", "block:cyclic", "block,NoPack")),
    # a cyclic distribution deals ranks to nodes in turn
    (
        slurm_step("2(x2)", "n[1-2]", 2, 4, rank=2, local=1, node=0, SLURM_DISTRIBUTION="cyclic:block"),
        {"rank_assignment": RankAssignment(2, 4, 1, 2), "node_rank": 0},
        [SRUN, "SLURM_DISTRIBUTION=cyclic:block"],
    ),
    *(
        (
            slurm_step("3,1,2", "n[1-3]", 3, 6, rank, local, node),
            {
                "rank_assignment": RankAssignment(rank, 6, local, local_size),
                "nnodes": 3,
                "node_rank": node,
                "address": "n1",
            },
            ["--nodes=3 --ntasks=3"],
        )
        for rank, local, node, local_size in ((0, 0, 0, 3), (2, 2, 0, 3), (3, 0, 1, 1), (4, 0, 2, 2), (5, 1, 2, 2))
    ),
    # one task a node is a node
    *(
        (STEP_OF_3[node], {"rank_assignment": None, "nnodes": 3, "node_rank": node, "address": "tux1"}, [])
        for node in STEP_OF_3
    ),
    (slurm_step("1", "n2", 1, 1, 0, 0, 0), {"nnodes": 1, "node_rank": 0, "rank_assignment": None}, []),
    # a shell of ``srun --pty`` over several nodes is warned of
    (slurm_step("1(x2)", "n[1-2]", 2, 2, 0, 0, 0, SLURM_PTY_PORT="41293"), {"nnodes": 2}, ["--cluster none"]),
    (slurm_step("1", "n1", 1, 1, 0, 0, 0, SLURM_PTY_PORT="41293"), {"nnodes": 1}, []),
    # SLURM_JOB_NODELIST stays the whole job's in a smaller step
    (
        slurm_step("1(x2)", "n[3-4]", 2, 2, 1, 0, 1, SLURM_JOB_NODELIST="n[1-4]", SLURM_JOB_NUM_NODES="4"),
        {"nnodes": 2, "node_rank": 1, "address": "n3"},
        [],
    ),
    # ``srun --preserve-env`` leaves both the job's
    (
        {**slurm_step("1(x2)", "n[1-2]", 2, 2, 1, 0, 1), "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"},
        {"nnodes": 2, "node_rank": 1},
        [],
    ),
    # Slurm numbers the components of a heterogeneous job through (tests/slurm/test_run.py)
    (slurm_step("1(x3)", "n[1-3]", 3, 3, 2, 0, 2, **OF_HET_JOB), {"nnodes": 3, "node_rank": 2}, []),
    # in a batch shell SLURM_PROCID is 0 and SLURM_NTASKS 4, and no task has been started
    (SLURM_BATCH, {**A_SCRIPT, "variables": ("SLURM_JOB_ID",)}, [f"srun {SRUN}"]),
    ({**SLURM_BATCH, "SLURM_JOB_NODELIST": "n1"}, A_SCRIPT, []),
    ({**ON_OWN, "SLURMD_NODENAME": OWN}, A_SCRIPT, ["one of its 2 hosts"]),
    # salloc's shell runs in a step of Slurm's own where the site has that (LaunchParameters=use_interactive_step)
    *(({**SLURM_TASK, "SLURM_STEP_ID": step}, A_SCRIPT, ["use all: srun"]) for step in ("4294967290", "4294967291")),
    (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        {"nnodes": 1},
        ["this shell is not on a node of Slurm job 7 (n1)"],
    ),
]


@pytest.mark.parametrize(("environ", "expected", "notes"), FOUND)
def test_detected_cluster_environments(
    environ: Mapping[str, str], expected: Mapping[str, Any], notes: list[str]
) -> None:
    cluster_env = require_detected(system.detect(environ), **expected)
    assert len(cluster_env.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, cluster_env.notes, strict=True))
    assert ("SLURM_STEP_ID" in cluster_env.variables) is not cluster_env.is_batch_script


def test_a_batch_shell_runs_where_slurm_says() -> None:
    """``sbatch --batch`` chooses the script's host; a process with its variables on another host is not the script."""
    with pytest.raises(UsageError, match=f"slurm job 1 runs on n1, and this is {OWN}"):
        system.detect({**ON_OWN, "SLURMD_NODENAME": "n1"})


def port(job: int, step: int) -> int:
    cluster_env = system.detect({**SLURM_TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
    assert cluster_env
    assert cluster_env.port is not None
    return cluster_env.port


def test_jobs_and_steps_near_each_other_never_share_a_port_nor_the_one_behind_it() -> None:
    ports = [port(job, step) for job in (41, 42, 43, 1040) for step in range(8)]
    assert len({each + behind for each in ports for behind in (0, 1)}) == 2 * len(ports)
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + 2 * PORT_PAIR_COUNT <= 31000
    assert port(67043328, 3) == port(67043328, 3)


CONTRADICTIONS = [
    ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5", "SLURM_STEP_TASKS_PER_NODE=2(x2) (tasks: 4)"),
    ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3", "SLURM_STEP_NODELIST=n[1-2] (nodes: 2)"),
    ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_TASKS_PER_NODE=4 (nodes: 1)"),
    ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS=8", "SLURM_TASKS_PER_NODE=2(x2) (tasks: 4)"),
    ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"),
    ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2", "SLURM_STEP_NUM_NODES=2"),
    ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2"),
]


@pytest.mark.parametrize(("changed", "one", "other"), CONTRADICTIONS)
def test_a_contradiction_shows_both_values(changed: dict[str, str], one: str, other: str) -> None:
    with pytest.raises(UsageError) as raised:
        system.detect({**SLURM_TASK, **changed})
    assert raised.value.message == f"{one} and {other} contradict each other"
    assert "--cluster none" in str(raised.value.hint)


NEEDED = [
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is not set"):
        system.detect({**SLURM_TASK, name: ""})


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID", *NEEDED[2:]])
def test_a_variable_that_is_not_a_number_is_named(name: str) -> None:
    for value in ("two", "-1", "1.5", "٣", "9" * 5000):
        with pytest.raises(UsageError, match=f"{name}={value} is not a number"):
            system.detect({**SLURM_TASK, name: value})


def test_a_node_list_that_does_not_parse_is_named() -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST: 'n\[1-' cannot be read"):
        system.detect({**SLURM_TASK, "SLURM_STEP_NODELIST": "n[1-"})
