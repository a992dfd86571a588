"""Tests of jobs whose nodes are started by one command each, with every value given."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import clean_environment, free_port, write_program
from tests.scaled_timeouts import scaled_timeout

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
dist.destroy_process_group()
"""


@pytest.mark.ci
@pytest.mark.parametrize(("mode", "late"), [("zygote", 0), pytest.param("exec", 1, marks=pytest.mark.ci)])
def test_two_nodes_of_different_size(start_ddplaunch, tmp_path, mode, late):
    """The nodes start in either order: the early one waits in torch's own rendezvous, the late one reads variables."""
    write_program(tmp_path, "train.py", SCRIPT)
    port = str(free_port())
    run = ("run", "--nnodes", "2", "--nproc", "2,1", "--control", "none", "--start", mode)
    typed = ("--node-rank", str(1 - late), "--master-addr", "127.0.0.1", "--master-port", port)
    variables = {"NODE_RANK": str(late), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = {1 - late: start_ddplaunch(*run, *typed, "train.py"), late: start_ddplaunch(*run, "train.py", env=variables)}
    codes = [jobs[node_rank].wait() for node_rank in (0, 1)]
    assert codes == [0, 0], jobs[0].stderr() + jobs[1].stderr()
    assert sorted(jobs[0].stdout().splitlines()) == ["[0] rank 0 of 3 sum 6", "[1] rank 1 of 3 sum 6"]
    assert jobs[1].stdout().splitlines() == ["[2] rank 2 of 3 sum 6"]
    for job in jobs.values():
        job.assert_nothing_left()


def test_control_none_runs_the_ranks_of_one_node(run_ddplaunch, tmp_path):
    """Each node starts its ranks without a connection to the others."""
    write_program(tmp_path, "hello.py", "import os; print('rank', os.environ['RANK'])")
    where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    options = ("--control", "none", "--nproc", "1", "--start", "exec", "--log-dir", "logs", "--run-id", "r")
    job = run_ddplaunch("run", *where, *options, "hello.py")
    assert (job.returncode, job.stdout) == (0, "[1] rank 1\n"), job.stderr
    assert (tmp_path / "logs/r/rank-1.log").read_text() == "rank 1\n"


@pytest.mark.ci
def test_a_node_started_by_hand_with_the_printed_variables(start_ddplaunch, run_in_fork, tmp_path):
    """Its ranks need only the variables that ``--dry-run --json`` prints for that node, and no ddplaunch there."""
    write_program(tmp_path, "train.py", SCRIPT)
    options = ("--nnodes", "2", "--nproc", "1,2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    node = ("run", *options, "--node-rank", "0", "--control", "none", "train.py")
    plan = json.loads(run_in_fork("run", "--dry-run", "--json", *node[1:]).stdout)
    job = start_ddplaunch(*node)
    others = [
        subprocess.Popen(
            [sys.executable, *rank["argv"][1:]],
            cwd=tmp_path,
            env=clean_environment(rank["env"]),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in plan["ranks"]
        if rank["node_rank"] == 1
    ]
    output = [other.communicate(timeout=scaled_timeout(90))[0] for other in others]
    assert job.wait() == 0, job.stderr()
    assert [text.strip() for text in output] == ["rank 1 of 3 sum 6", "rank 2 of 3 sum 6"]
