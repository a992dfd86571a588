"""``ddplaunch submit`` with a real sbatch: from the login host to the ranks and back to an exit code."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, command, write
from tests.slurm.test_run import SHOWS, lines


@pytest.fixture
def submit(slurm):
    """A cluster of two nodes, and what starts ``ddplaunch submit`` on its login host."""
    cluster = slurm(2)

    def start(*words: str | Path) -> subprocess.Popen[str]:
        return cluster.login.start(
            command("submit", *words),
            cwd=cluster.folder,
            env={**clean_environment(), **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return cluster, start


def number_of(following: subprocess.Popen[str]) -> int:
    """Read what it says up to the job's number."""
    assert following.stderr is not None
    said = ""
    while not (found := re.search(r"job (\d+):", said)):
        line = following.stderr.readline()
        assert line, said
        said += line
    return int(found[1])


@pytest.mark.slow
def test_a_job_on_two_nodes_is_followed_to_its_end(submit, tmp_path):
    cluster, start = submit
    write(tmp_path, "train.py", SHOWS)
    out, err = start("--nodes", "2", "--follow", "train.py", "--nproc", "2").communicate(timeout=100)
    assert lines(out) == ["sum 4 0 0 4 2 0 2", "sum 4 1 1 4 2 0 2", "sum 4 2 0 4 2 1 2", "sum 4 3 1 4 2 1 2"], err
    assert "slurm: this is node 0 of 2, at n1" in out
    assert not [pid for host in cluster.network.hosts for pid in host.find("train.py")]


@pytest.mark.slow
def test_the_exit_code_of_a_rank_comes_back(submit):
    _, start = submit
    following = start("--nodes", "2", "--follow", PROGRAMS / "fails.py", "--", "exit", "1")
    out, err = following.communicate(timeout=100)
    assert following.returncode == 7, err
    assert "ddplaunch: rank 1 exited with code 7" in out


@pytest.mark.slow
def test_a_cancelled_job_is_stopped_on_all_nodes(submit):
    """SIGTERM reaches every launcher at once, and the ranks have their grace."""
    cluster, start = submit
    following = start("--nodes", "2", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready", 2)
    cluster.cancel(job)
    following.communicate(timeout=60)
    assert following.returncode == 143
    assert cluster.wait(job) == "CANCELLED"
    assert not [pid for host in cluster.network.hosts for pid in host.find("sleeper.py")]


@pytest.mark.slow
def test_what_slurm_refuses_is_said(submit, tmp_path):
    _, start = submit
    write(tmp_path, "train.py", "")
    refused = start("--partition", "nosuch", "train.py")
    out, err = refused.communicate(timeout=60)
    assert (refused.returncode, out) == (2, "")
    assert "invalid partition specified: nosuch" in err
    assert "sbatch did not take the job" in err


@pytest.mark.slow
def test_detaching_leaves_the_job_running(submit):
    cluster, start = submit
    following = start("--nodes", "1", "--follow", PROGRAMS / "sleeper.py")
    job = number_of(following)
    cluster.wait_for(job, "ready")
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=30)
    assert following.returncode == 130
    assert cluster.state(job) == "RUNNING"
    cluster.cancel(job)
