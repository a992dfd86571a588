"""Tests of programs in jobs of several nodes: they run on node 0, and all ranks reach them. Here on one machine."""

import signal
import sys

import pytest

from tests.conftest import PROGRAMS, free_port, wait_until
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

SERVER = ("--command", "--name", "vllm", "--ready", "http:/health", sys.executable, PROGRAMS / "server.py", "{port}")


@pytest.fixture
def begin(start_ddplaunch):
    """Start a job of two nodes; of none is anything left at the end."""
    jobs = []

    def start(*how, rank=()):
        port = str(free_port())
        for node in ("0", "1"):
            where = ("--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
            target = ("--nproc", "1", *EXEC, PROGRAMS / "client.py", "http://{vllm}/x", *rank)
            jobs.append(start_ddplaunch("run", *SERVER, *how, ":", *where, *target))
        return jobs

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


def test_ranks_of_all_nodes_wait_for_the_server_of_node_0(begin):
    jobs = begin("late=0.5", rank=("once",))
    assert [job.wait() for job in jobs] == [0, 0]
    for number, job in enumerate(jobs):
        assert f"rank {number} got ok from http://127.0.0.1:" in job.stdout()
    assert "[vllm] listening" in jobs[0].stderr()
    assert "[vllm]" not in jobs[1].stderr()


def test_all_nodes_end_with_the_code_of_the_server(begin, tmp_path):
    jobs = begin("exit=7")
    for job in jobs:
        job.wait_for("got ok")
    (tmp_path / "end").touch()
    assert [job.wait() for job in jobs] == [7, 7]
    for job in jobs:
        assert "vllm exited with code 7 before client.py was done" in job.stderr()


def test_a_server_that_ends_before_it_is_ready_ends_all_nodes(begin, tmp_path):
    jobs = begin("late=1000", "exit=3")
    wait_until(lambda: "waiting for vllm" in jobs[0].stderr(), "the wait")
    (tmp_path / "end").touch()
    assert [job.wait() for job in jobs] == [3, 3]


def test_ctrl_c_on_another_node(begin):
    jobs = begin()
    for job in jobs:
        job.wait_for("got ok")
    jobs[1].signal(signal.SIGINT)
    assert [job.wait() for job in jobs] == [130, 130]
    assert "asked to end" in jobs[0].stderr()


def test_kill_9_of_node_0_ends_the_server_and_the_other_node(begin):
    jobs = begin("children")
    for job in jobs:
        job.wait_for("got ok")
    jobs[0].signal(signal.SIGKILL)
    assert jobs[1].wait() == 69
