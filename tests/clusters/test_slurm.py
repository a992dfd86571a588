"""Slurm: steps and what is none."""

from __future__ import annotations

import os

import pytest

from ddplaunch.clusters.finding import RankPlace
from ddplaunch.clusters.reading import FIRST_PORT, PORT_PAIRS
from ddplaunch.clusters.systems.slurm import slurm as system
from ddplaunch.errors import UsageError
from tests.clusters.samples import SLURM_BATCH, SLURM_TASK, slurm_step


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_without_slurm() -> None:
    assert system.find({"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_PROCID": "0"}) is None


def test_a_task_of_several_a_node_is_a_rank() -> None:
    finding = system.find(SLURM_TASK)
    assert finding
    assert finding.place == RankPlace(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert (finding.nnodes, finding.node_rank, finding.address) == (2, 1, "n1")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in finding.notes[0]
    assert finding.run_id == "1.0"
    assert "SLURM_STEP_ID" in finding.variables


@pytest.mark.parametrize("node", [0, 1, 2])
def test_one_task_a_node_is_a_node(node: int) -> None:
    finding = system.find(slurm_step("1(x3)", "tux[1-2],gpu07", 3, 3, node, 0, node))
    assert finding
    assert finding.place is None
    assert (finding.nnodes, finding.node_rank, finding.address, finding.notes) == (3, node, "tux1", ())


def test_one_task_alone_is_a_node_alone() -> None:
    finding = system.find(slurm_step("1", "n2", 1, 1, 0, 0, 0))
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place) == (1, 0, None)


@pytest.mark.parametrize(
    ("rank", "local", "node", "local_size"), [(0, 0, 0, 3), (2, 2, 0, 3), (3, 0, 1, 1), (4, 0, 2, 2), (5, 1, 2, 2)]
)
def test_uneven_tasks(rank: int, local: int, node: int, local_size: int) -> None:
    finding = system.find(slurm_step("3,1,2", "n[1-3]", 3, 6, rank, local, node))
    assert finding
    assert finding.place == RankPlace(rank, 6, local, local_size)
    assert (finding.nnodes, finding.node_rank, finding.address) == (3, node, "n1")


def test_a_cyclic_distribution_deals_ranks_to_nodes_in_turn() -> None:
    finding = system.find(
        slurm_step("2(x2)", "n[1-2]", 2, 4, rank=2, local=1, node=0, SLURM_DISTRIBUTION="cyclic:block")
    )
    assert finding
    assert finding.place == RankPlace(rank=2, world_size=4, local_rank=1, local_world_size=2)
    assert finding.node_rank == 0
    assert finding.notes[1].startswith("SLURM_DISTRIBUTION=cyclic:block")


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "block,NoPack"])
def test_blocks_need_no_word(distribution: str) -> None:
    finding = system.find({**SLURM_TASK, "SLURM_DISTRIBUTION": distribution})
    assert finding
    assert len(finding.notes) == 1


def test_a_batch_shell_is_not_rank_0() -> None:
    """SLURM_PROCID is 0 and SLURM_NTASKS 4 in it, and nobody has started any task."""
    finding = system.find(SLURM_BATCH)
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.place, finding.address) == (1, 0, None, None)
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in finding.notes[0]
    assert finding.variables == ("SLURM_JOB_ID",)


def test_a_batch_shell_on_one_node_needs_no_word() -> None:
    finding = system.find({**SLURM_BATCH, "SLURM_JOB_NODELIST": "n1"})
    assert finding
    assert (finding.nnodes, finding.notes) == (1, ())


def test_a_batch_shell_runs_where_slurm_says() -> None:
    """``sbatch --batch`` chooses its host; one that has its variables elsewhere was started by something else."""
    own = os.uname().nodename
    job = {**SLURM_BATCH, "SLURM_JOB_NODELIST": f"n1,{own}"}
    finding = system.find({**job, "SLURMD_NODENAME": own})
    assert finding
    assert finding.is_script
    with pytest.raises(UsageError, match=f"the script of slurm job 1 runs on n1, and this is {own}: it may be one of"):
        system.find({**job, "SLURMD_NODENAME": "n1"})


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_the_shell_of_salloc_is_no_step(step: str) -> None:
    """It runs in Slurm's own interactive step where the site has that (LaunchParameters=use_interactive_step)."""
    finding = system.find({**SLURM_TASK, "SLURM_STEP_ID": step})
    assert finding
    assert (finding.nnodes, finding.place) == (1, None)


def test_the_shell_of_salloc_elsewhere_is_on_no_node_of_the_job() -> None:
    finding = system.find({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"})
    assert finding
    assert finding.notes[0].startswith("this shell is not on a node of Slurm job 7 (n1)")


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_job_named_bash_is_a_step_all_the_same(name: str) -> None:
    """``srun bash -c …`` names the job so; peers take it for a shell in which somebody types."""
    finding = system.find({**SLURM_TASK, "SLURM_JOB_NAME": name})
    assert finding
    assert finding == system.find(SLURM_TASK)


def test_a_shell_of_srun_pty_over_several_nodes_is_warned_of() -> None:
    finding = system.find(slurm_step("1(x2)", "n[1-2]", 2, 2, 0, 0, 0, SLURM_PTY_PORT="41293"))
    assert finding
    assert "--cluster none" in finding.notes[0]
    alone = system.find(slurm_step("1", "n1", 1, 1, 0, 0, 0, SLURM_PTY_PORT="41293"))
    assert alone
    assert alone.notes == ()


def test_a_smaller_step_counts_by_its_own_variables() -> None:
    """SLURM_JOB_NODELIST stays the whole job's in it."""
    finding = system.find(
        slurm_step("1(x2)", "n[3-4]", 2, 2, 1, 0, 1, SLURM_JOB_NODELIST="n[1-4]", SLURM_JOB_NUM_NODES="4")
    )
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.address) == (2, 1, "n3")


def test_a_step_may_keep_the_jobs_counts() -> None:
    """``srun --preserve-env`` leaves SLURM_NTASKS and SLURM_TASKS_PER_NODE the job's."""
    kept = {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
    finding = system.find({**slurm_step("1(x2)", "n[1-2]", 2, 2, 1, 0, 1), **kept})
    assert finding
    assert (finding.nnodes, finding.node_rank) == (2, 1)


def test_a_restart_changes_nothing() -> None:
    assert system.find({**SLURM_TASK, "SLURM_RESTART_COUNT": "2"}) == system.find(SLURM_TASK)


def test_a_step_over_the_components_of_a_heterogeneous_job() -> None:
    """Slurm numbers its nodes and tasks through, so there is nothing to say (tests/slurm/test_run.py)."""
    told = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2"}
    finding = system.find(slurm_step("1(x3)", "n[1-3]", 3, 3, 2, 0, 2, **told))
    assert finding
    assert (finding.nnodes, finding.node_rank, finding.notes) == (3, 2, ())


def port(job: int, step: int) -> int:
    finding = system.find({**SLURM_TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
    assert finding
    assert finding.port is not None
    return finding.port


def test_jobs_and_steps_near_each_other_never_share_a_port_nor_the_one_behind_it() -> None:
    ports = [port(job, step) for job in (41, 42, 43, 1040) for step in range(8)]
    assert len({each + behind for each in ports for behind in (0, 1)}) == 2 * len(ports)
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + 2 * PORT_PAIRS <= 31000
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
        system.find({**SLURM_TASK, **changed})
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
        system.find(without(SLURM_TASK, name))


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID", *NEEDED[2:]])
@pytest.mark.parametrize("value", ["two", "-1", "1.5", "٣", "9" * 5000])
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={value} is not a number"):
        system.find({**SLURM_TASK, name: value})


def test_a_node_list_that_does_not_parse_is_named() -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST: 'n\[1-' cannot be read"):
        system.find({**SLURM_TASK, "SLURM_STEP_NODELIST": "n[1-"})
