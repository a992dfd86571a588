"""Tests of several programs in one step of a real Slurm: two nodes train, and one serves."""

import os
import re
import signal

import pytest

from tests.conftest import PROGRAMS, clean_environment, ddplaunch_command, wait_until, write_program
from tests.features.ssh.job import LAUNCHER
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC
from tests.tools.virtual_hosts.host import finish

pytestmark = [pytest.mark.ci, pytest.mark.slow]

JOB = f"""
[programs.infer]
command = "python3 server.py {{port}} public exit=7"
nodes = 1
ready = "http:/health"

[programs.trainer]
target = "--nproc 1 {" ".join(EXEC)} train.py http://{{infer}}/x"
nodes = 2
"""
STEP = ("-N3", "-n3", "--ntasks-per-node=1", *ddplaunch_command("run", "rl.toml"))


@pytest.fixture
def cluster(slurm, tmp_path):
    found = slurm(3)
    for name, source in (("server.py", "server.py"), ("train.py", "client.py")):
        write_program(tmp_path, name, (PROGRAMS / source).read_text())
    (tmp_path / "rl.toml").write_text(JOB)
    yield found
    left = {host.name: host.find(r"server\.py|train\.py|zygote\.py") for host in found.nodes}
    assert not any(left.values()), left


def submit(cluster, *words):
    """Submit the job; return its number once both ranks have an answer of the server."""
    environment = {**clean_environment(), **cluster.environment}
    line = ddplaunch_command("submit", "--nodes", "3", *words, "rl.toml")
    submitted = cluster.login.type(line, cluster.folder, environment)
    out, error = submitted.communicate(timeout=scaled_timeout(60))
    assert submitted.returncode == 0, error
    number = int(re.search(r"job (\d+)", out)[1])
    cluster.wait_for(number, "got ok", 2)
    return number


def test_a_step_in_which_one_node_serves(cluster, tmp_path):
    """It ends when training is done, or with the code of the server; with too few nodes it does not begin."""
    (tmp_path / "go").touch()
    out, _ = finish(cluster.srun(*STEP))
    assert len(re.findall(r"rank [01] got ok from http://10\.77\.0\.13:\d+/x", out)) == 2, out
    (tmp_path / "go").unlink()
    (tmp_path / "end").touch()
    _, error = finish(cluster.srun(*STEP), 7)
    assert "infer exited with code 7" in error
    _, error = finish(cluster.srun("-N2", "-n2", *STEP[2:]), 2)
    assert "the programs need 3 nodes, and the job has 2\n  trainer 2, infer 1" in error


def test_a_batch_job_whose_server_ends_with_it(cluster, tmp_path):
    number = submit(cluster)
    (tmp_path / "go").touch()
    assert cluster.wait(number, timeout=30) == "COMPLETED"
    (tmp_path / "go").unlink()
    number = submit(cluster)
    cluster.cancel(number)
    assert cluster.wait(number) == "CANCELLED"
    wait_until(lambda: not any(host.find(r"server\.py|train\.py") for host in cluster.nodes), "the end of all")


def test_the_launcher_on_the_node_that_serves_is_killed(cluster):
    number = submit(cluster)
    launchers = cluster.nodes[2].find(LAUNCHER)
    assert launchers
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)
    assert cluster.wait(number, timeout=60) == "FAILED"
    assert re.search(r"node 2 \(n3\) was lost: ", cluster.output(number))
