"""Tests of cluster detection by ``run``: options go before variables, and ``--cluster none`` ignores them."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.cli.test_several_nodes import SCRIPT
from tests.conftest import assert_refused, ddplaunch_command, free_port, run_command, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import EXEC
from tests.system.clusters.recorded_environments import openmpi

SLURM_STEP = {  # one task a node on the last two nodes of three
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip

SLURM_TASKS = {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
               "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}  # fmt: skip


@pytest.fixture
def planned(run_in_fork, tmp_path):
    """The dry run's object."""
    write_program(tmp_path, "train.py", "print('started')\n")

    def plan(environ, *options):
        done = run_in_fork("run", "--dry-run", "--json", *options, "train.py", env=environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return plan


def facts(plan) -> dict[str, tuple[str, str]]:
    return {fact["name"]: (fact["value"], fact["source"]) for fact in plan["facts"]}


def test_a_slurm_step_of_one_task_a_node_needs_nothing_typed(planned):
    plan = planned(SLURM_STEP)
    assert (plan["nnodes"], plan["node_rank"], plan["master_addr"]) == (2, 1, "n2")
    assert facts(plan)["node rank"] == ("1", "slurm")
    assert facts(plan)["master address"] == ("n2", "slurm")
    assert facts(plan)["master port"][1] == "slurm"
    assert plan == planned(SLURM_STEP) | {"run_id": plan["run_id"]}, "the port is the job's, not chance"


def test_options_override_the_cluster(planned):
    plan = planned(SLURM_STEP, "--master-port", "4000", "--master-addr", "10.0.0.9", "--nproc", "3")
    assert (plan["master_addr"], plan["master_port"], plan["world_size"]) == ("10.0.0.9", 4000, 6)
    assert facts(plan)["master port"] == ("4000", "--master-port")
    alone = planned(SLURM_STEP, "--nnodes", "1")
    assert (alone["nnodes"], alone["world_size"]) == (1, 1)


def test_slurm_knows_the_node_rank_where_only_the_number_of_nodes_is_typed(planned):
    plan = planned(SLURM_STEP, "--nnodes", "2")
    assert (plan["nnodes"], plan["node_rank"], plan["master_addr"]) == (2, 1, "n2")
    assert planned(SLURM_STEP, "--nnodes", "1:2")["node_rank"] == 1
    typed = planned(SLURM_STEP, "--nnodes", "2", "--node-rank", "0", "--master-addr", "n9")
    assert (typed["node_rank"], typed["master_addr"]) == (0, "n9")
    assert planned(SLURM_STEP, "--nnodes", "3", "--node-rank", "2")["node_rank"] == 2, "of two steps, say"


C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=n2:29500")


@pytest.mark.parametrize("how", [("--node-rank=1", "--master-addr=n2"), C10D], ids=["static", "c10d"])
def test_more_tasks_than_nodes_are_refused(planned, run_in_fork, tmp_path, how):
    """Two launchers on one machine would count as two nodes, each with a LOCAL_RANK 0."""
    write_program(tmp_path, "train.py", "")
    words = ("run", "--nnodes=2", *how, "train.py")
    done = run_in_fork(*words, env={**SLURM_TASKS, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: Slurm has started 4 tasks, and the job has 2 nodes (--nnodes): each task would be a node",
        "  one task on each node: srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ddplaunch run …",
        "  or --cluster none, if the step runs several jobs",
    ]
    other = run_in_fork(*words, env=SLURM_TASKS)
    assert (other.returncode, other.stdout, other.stderr) == (2, "", ""), (
        "srun shows the output of all tasks: it is printed once"
    )
    assert planned(SLURM_TASKS, "--nnodes=1")["nnodes"] == 1, "a job each"
    assert planned(SLURM_TASKS, "--nnodes=2", "--spares=2", "--node-rank=1", "--master-addr=n2")["node_rank"] == 1
    assert planned(SLURM_TASKS, "--cluster=none", "--nnodes=2", "--node-rank=1")["node_rank"] == 1


def test_variables_override_the_cluster(planned):
    plan = planned({**SLURM_STEP, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (plan["master_addr"], plan["master_port"]) == ("10.0.0.9", 4000)
    assert facts(plan)["master address"] == ("10.0.0.9", "MASTER_ADDR")


def test_a_task_with_a_rank_starts_one_rank(planned):
    plan = planned(SLURM_TASKS)
    (rank,) = plan["ranks"]
    assert (plan["nnodes"], plan["node_rank"], rank["local_rank"]) == (2, 1, 1), "as users count, not a node each"
    environ = {name: rank["env"].get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert environ == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert (rank["env"]["GROUP_RANK"], rank["env"]["GROUP_WORLD_SIZE"]) == ("1", "2")


def test_an_external_rank_is_reported_alone(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", "train.py", env=openmpi(1, 2, 1, 2))
    assert done.stdout.startswith(
        "rank 1 of 2, each with its own launcher: python train.py\nthis rank: 1 of 2 (openmpi)\n"
    )
    assert "\nrank 1  node 0  host" in done.stdout
    assert "rank 0" not in done.stdout
    assert "node 0: ddplaunch" not in done.stdout


def test_a_rank_that_sees_only_its_own_gpu_is_local_rank_0(planned, fake_nvml):
    """Programs choose their device by LOCAL_RANK, and srun --gpus-per-task=1 hides cuda:1."""
    own = {"CUDA_VISIBLE_DEVICES": "1"}
    for environ, local_rank, device in ((own, "0", "cuda:0"), ({}, "1", "cuda:1")):
        plan = planned({**fake_nvml.environ(2), **SLURM_TASKS, **environ})
        (rank,) = plan["ranks"]
        assert (rank["env"]["LOCAL_RANK"], rank["device"]) == (local_rank, device)


def test_more_processes_in_each_of_many_are_refused(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork(
        "run", "--nproc", "4", "train.py", env={**SLURM_TASKS, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Error: --nproc 4 does not work here: slurm has started 4 ranks already, and this is rank 0",
        "  leave --nproc out, or --cluster none; or start one launcher on each node:",
        "  srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ddplaunch run --nproc 4 …",
    ]
    other = run_in_fork("run", "--nproc", "4", "train.py", env=SLURM_TASKS)
    assert (other.returncode, other.stdout, other.stderr) == (2, "", ""), (
        "srun shows the output of all tasks: it is printed once"
    )


def test_tasks_that_each_train_alone_are_noted(planned):
    step = {**SLURM_STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    for words in (("--standalone", "--nproc", "2"), ("--nnodes", "1", "--nproc", "2")):
        (note,) = [each for each in planned(step, *words)["notes"] if "trains alone" in each]
        assert "Slurm has started 2 tasks of this step, and each trains alone" in note
    second = {**step, "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
    for environ, words in ((second, ("--standalone",)), (step, ("--standalone", "--cluster", "none")), (step, ())):
        assert not [each for each in planned(environ, *words)["notes"] if "trains alone" in each], words


def test_exports_of_a_run_without_a_launcher_do_not_count(planned, run_in_fork, tmp_path):
    """Tutorials for one process export them; torchrun ignores them."""
    exported = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    plan = planned(exported, "--nproc", "2")
    assert (plan["nnodes"], plan["world_size"]) == (1, 2)
    expected = "ignoring RANK=0, WORLD_SIZE=1, LOCAL_RANK=0 from the environment: --nproc 2 starts its own ranks"
    assert plan["notes"][0] == expected
    in_slurm = planned({**SLURM_STEP, **exported}, "--nproc", "2")
    assert (in_slurm["nnodes"], in_slurm["world_size"]) == (2, 4), "the rest of the surroundings still counts"
    assert planned(exported)["notes"] == [], "the one rank that they are for"
    write_program(tmp_path, "train.py", "")
    of_torchrun = {**exported, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}
    done = run_in_fork("run", "--nproc", "2", "train.py", env=of_torchrun)
    assert_refused(done, "torchelastic has started 1 rank ")


def test_tasks_of_one_machine_are_not_called_nodes(start_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", "")
    options = ("--start", "exec", "--master-port", str(free_port()), "--join-timeout", "0.5")
    job = start_ddplaunch("run", *options, "train.py", env=openmpi(0, 4, 0, 4))
    assert job.wait() == 69
    assert "only 1 of 4 tasks joined in 0.5 s (--join-timeout): task 1, 2, 3 are missing" in job.stderr()


@pytest.mark.ci
def test_ranks_that_torchrun_has_started_run_under_it(tmp_path):
    """torchrun holds the store and coordinates; each ddplaunch below it runs one rank."""
    write_program(tmp_path, "train.py", SCRIPT)
    logs = ("--log-dir", str(tmp_path / "torchrun"))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *logs, "--no-python")
    done = run_command([*torchrun, *ddplaunch_command("run", "train.py")], tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "[0] rank 0 of 2 sum 3" in done.stdout
    assert "[1] rank 1 of 2 sum 3" in done.stdout


@pytest.mark.ci
def test_a_job_that_a_rank_starts_is_its_own(run_ddplaunch, tmp_path):
    """The inner launcher inherits node rank and world size of the outer job, and ignores them."""
    write_program(
        tmp_path, "inner.py", "import os; print('inner', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    write_program(
        tmp_path,
        "train.py",
        """
        import os, subprocess, sys
        options = ["--nproc", "2"] if os.environ["RANK"] == "0" else []
        command = [sys.executable, "-m", "ddplaunch", "run", *options, "--start", "exec", "inner.py"]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        """,
    )
    done = run_ddplaunch("run", "--nproc", "2", "--start", "exec", "train.py")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"inner {inner}") for inner in ("0 of 2", "1 of 2", "0 of 1")] == [1, 1, 1]


def slurm_node(rank: int, port: int) -> dict[str, str]:
    """The variables of one of two nodes of a step, both of them here."""
    return {**SLURM_STEP, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}  # fmt: skip


@pytest.mark.ci
def test_what_srun_shows_of_all_nodes_is_printed_once(start_ddplaunch, tmp_path):
    """Node 0 prints warnings, restarts and the report; other nodes print only what concerns themselves."""
    write_program(
        tmp_path,
        "train.py",
        """
        import os, sys, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, flush=True)
        if attempt == "0" and os.environ["RANK"] == "1":
            sys.exit(3)
        time.sleep(1000)
        """,
    )
    port = free_port()
    words = ("run", "--nproc", "1", "--start", "exec", "--max-restarts", "1", "--log-dir", "logs", "train.py")
    first, second = (start_ddplaunch(*words, env=slurm_node(rank, port)) for rank in (0, 1))
    for each in (first, second):
        each.wait_for("attempt 1")
    second.signal(signal.SIGTERM)
    assert (first.wait(), second.wait()) == (143, 143)
    assert "ddplaunch: rank 1 exited with code 3" in first.stderr()
    assert "ddplaunch: SIGTERM on node 1" in first.stderr()
    assert second.stderr().splitlines() == [f"ddplaunch: log folder: logs/4711.0/node-1 on {os.uname().nodename}"]


# ---------------------------------------------------------------------------------------------- a project's defaults

PROJECT = """
[tool.ddplaunch.run]
nproc = 3
grace = 2.5
log-dir = "logs"
no-history = true
restart-on = "always"
"""


def test_a_project_has_defaults(planned, run_in_fork, tmp_path):
    file = write_program(tmp_path, "pyproject.toml", PROJECT)
    (tmp_path / "deep").mkdir()
    note = f"defaults of {file}: --nproc 3 --grace 2.5 --log-dir logs --no-history --restart-on always"
    plan = planned({})
    assert (plan["world_size"], plan["notes"]) == (3, [note])
    assert planned({}, "--nproc", "2")["world_size"] == 2
    assert planned({"PET_NPROC_PER_NODE": "2"})["world_size"] == 2
    assert planned({}, "--no-config")["world_size"] == 1
    assert planned(SLURM_STEP, "--master-addr", "n2")["world_size"] == 6, "before what is detected"
    assert planned(SLURM_TASKS)["world_size"] == 4, "but not where another launcher has started the ranks"
    deep = run_in_fork("run", "--dry-run", "../train.py", cwd=tmp_path / "deep")
    assert f"--log-dir {tmp_path}/logs --no-history" in deep.stdout, "beside the file that names it"


def test_a_projects_defaults_are_noted_once_a_run(run_ddplaunch, tmp_path):
    file = write_program(tmp_path, "pyproject.toml", "[tool.ddplaunch.run]\nnproc = 2\nmax-restarts = 1\nshow = '0'\n")
    write_program(
        tmp_path,
        "train.py",
        "import os\nprint('rank', os.environ['RANK'])\n"
        "assert os.environ['RANK'] == '1' or os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n",
    )
    done = run_ddplaunch("run", *EXEC, "train.py")
    assert (done.returncode, done.stdout) == (0, "[0] rank 0\n" * 2)
    assert done.stderr.count(f"ddplaunch: defaults of {file}: --nproc 2 --max-restarts 1 --show 0\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("npro = 2", ("unknown key npro in [tool.ddplaunch.run]", "did you mean nproc?")),
        ("hosts = 'n1'", ("unknown key hosts in [tool.ddplaunch.run]", "a project's file cannot set it: use --hosts")),
        ("sidecar = 'x'", ("unknown key sidecar", "use --sidecar")),
        ("preload = 'x'", ("unknown key preload", "use --preload")),
        ("partition = 'x'", ("unknown key partition", "it belongs in [tool.ddplaunch.submit]")),
        ("grace = 'x'", ('[tool.ddplaunch.run] grace = "x": expected a time',)),
        ("start = 'x'", ('[tool.ddplaunch.run] start = "x": expected auto or zygote or exec',)),
        ("check = 1", ("[tool.ddplaunch.run] check = 1: expected true or false",)),
        ("nproc = 'x'", ("--nproc x: expected a number", "defaults of {file}: --nproc x")),
        ("[tool.ddplaunch.rum]", ("unknown table [tool.ddplaunch.rum]", "reads [tool.ddplaunch.run], ")),
        ("nproc =", ("TOML syntax error",)),
    ],
)
def test_invalid_project_defaults_are_refused(text, expected, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    file = write_program(tmp_path, "pyproject.toml", f"[tool.ddplaunch.run]\n{text}\n")
    assert_refused(run_in_fork("run", "train.py"), *(words.format(file=file) for words in expected), str(file))
    assert run_in_fork("run", "--dry-run", "--no-config", "train.py").returncode == 0
