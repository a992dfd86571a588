"""Tests of several programs on hosts that are reached over SSH: from one terminal, each host with its own part."""

import re
import signal

import pytest

from tests.conftest import PROGRAMS, wait_until, write_program
from tests.features.ssh.job import Job
from tests.start_modes import EXEC

pytestmark = [pytest.mark.ci, pytest.mark.slow]

JOB = f"""
[programs.infer]
command = "python3 server.py {{port}} public"
nodes = 2
ready = "http:/health"

[programs.trainer]
target = "--nproc 1 {" ".join(EXEC)} train.py http://{{infer}}/x"
nodes = 1
"""


@pytest.fixture
def job(sshd, tmp_path):
    """A job of three hosts: n0 trains, the others serve."""
    for name, source in (("server.py", "server.py"), ("train.py", "client.py")):
        write_program(tmp_path, name, (PROGRAMS / source).read_text())
    (tmp_path / "rl.toml").write_text(JOB)
    run = Job(sshd(3), tmp_path, "--hosts", "n0,n1,n2", "rl.toml")
    wait_until(lambda: "got ok" in run.stdout() or run.process.poll() is not None, f"a rank: {run.stderr()}", 100)
    assert "got ok" in run.stdout(), run.stderr()
    yield run
    run.process.terminate()
    run.assert_nothing_left()


def test_a_rank_reaches_the_servers_of_other_hosts(job, tmp_path):
    """By the address at which their hosts are reached."""
    assert re.search(r"rank 0 got ok from http://10\.77\.0\.11:\d+/x", job.stdout())
    for index, address in enumerate(("10.77.0.11", "10.77.0.12")):
        assert f"ddplaunch: infer.{index} is ready at {address}:" in job.stderr()
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert job.stderr().count("asked to end") == 2


def test_a_host_with_a_server_is_lost(job):
    job.hosts[2].power_off()
    assert job.wait() == 69
    assert "n2" in job.stderr()


def test_ctrl_c(job):
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert "rank 0 has saved" in job.stdout()
    assert job.stderr().count("asked to end") == 2


def test_too_few_hosts(sshd, tmp_path):
    for name in ("server.py", "train.py"):
        write_program(tmp_path, name, "")
    (tmp_path / "rl.toml").write_text(JOB)
    run = Job(sshd(2), tmp_path, "--hosts", "n0,n1", "rl.toml")
    assert run.wait() == 2
    assert run.stderr().count("the programs need 3 nodes, and the job has 2") == 1, run.stderr()
    run.assert_nothing_left()
