"""Tests that a node which is refused before it joins ends the job where all nodes were started together."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.conftest import free_port, wait_until, write_program

HOST = os.uname().nodename


def slurm(node_rank: int, nnodes: int = 2) -> dict[str, str]:
    """What a step with one task a node has, all nodes on this machine."""
    names = f"n[0-{nnodes - 1}]"
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": names, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": str(nnodes), "SLURM_STEP_NUM_TASKS": str(nnodes), "SLURM_NTASKS": str(nnodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nnodes})", "SLURM_PROCID": str(node_rank), "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node_rank), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


@pytest.fixture
def step(start_ddplaunch, tmp_path):
    """Start one node of such a job."""
    write_program(tmp_path, "hello.py", "print('hello')")
    port = str(free_port())

    def begin(environ, *words):
        options = ("--start", "exec", "--join-timeout", "600", *words)
        return start_ddplaunch("run", *options, "hello.py", env={**environ, "MASTER_PORT": port})

    return begin


@pytest.mark.parametrize(
    ("bad", "words", "expected"),
    [
        (0, ("--nproc", "gpu"), "--nproc gpu"),
        (1, ("--gpus", "7"), "--gpus 7"),
        (1, ("--log-dir", "hello.py/logs"), "--log-dir hello.py/logs: Not a directory"),
    ],
)
def test_a_refused_node_ends_the_job_with_its_reason(step, bad, words, expected):
    jobs = []
    for rank in (0, 1):
        own = words if rank == bad else ("--nproc", "1")
        jobs.append(step(slurm(rank), *own))
    assert [job.wait(20) for job in jobs] == [2, 2], jobs[0].stderr() + jobs[1].stderr()
    assert f"Error: node {bad} ({HOST}): {expected}" in jobs[1 - bad].stderr()
    late = "--log-dir" in words  # it makes its folder when it has joined, and leaves the word to node 0
    assert late or f"Error: {expected}" in jobs[bad].stderr()
    for rank, job in enumerate(jobs):
        assert "Traceback" not in job.stderr()
        assert job.stdout() == "" or (late and rank == 0), "a rank there may have begun meanwhile"
        job.assert_nothing_left()


def test_nodes_that_are_all_refused_end_at_once(step):
    jobs = [step(slurm(rank), "--gpus", "7") for rank in (0, 1)]
    assert [job.wait(8) for job in jobs] == [2, 2]


def test_the_reason_is_shown_at_once_and_ctrl_c_ends_the_wait(step):
    job = step(slurm(1), "--gpus", "7")
    wait_until(lambda: "Error: --gpus 7" in job.stderr(), "the reason")
    job.signal(signal.SIGINT)
    assert job.wait(5) in (2, 130)
    assert "Traceback" not in job.stderr()


@pytest.mark.ci
def test_a_refused_node_without_the_token_does_not_end_the_job(step):
    """Otherwise any program that reaches the port could end the job."""
    zero = step(slurm(0), "--nproc", "1", "--token", "right")
    wrong = step(slurm(1), "--gpus", "7", "--token", "wrong")
    assert wrong.wait(20) == 2
    right = step(slurm(1), "--nproc", "1", "--token", "right")
    assert (zero.wait(20), right.wait(20)) == (0, 0), zero.stderr()


@pytest.mark.ci
def test_a_refused_node_that_a_user_started_may_be_started_again(start_ddplaunch, tmp_path):
    """Where users start the nodes one by one, a wrong option on one does not end the job."""
    write_program(tmp_path, "hello.py", "print('hello')")
    words = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--start", "exec")
    zero = start_ddplaunch("run", *words, "--node-rank", "0", "--nproc", "1", "hello.py")
    wait_until(lambda: "1/2 nodes joined" in zero.stderr(), "the account")
    slip = start_ddplaunch("run", *words, "--node-rank", "1", "--gpus", "7", "hello.py")
    assert slip.wait(20) == 2
    again = start_ddplaunch("run", *words, "--node-rank", "1", "--nproc", "1", "hello.py")
    assert (zero.wait(20), again.wait(20)) == (0, 0)


@pytest.mark.parametrize("typed", [True, False])
def test_a_port_that_is_taken_ends_all_nodes(step, start_ddplaunch, tmp_path, typed):
    """They end even if a user started each of them: node 0 cannot start with this port."""
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("", port))
        taken.listen()
        if typed:
            write_program(tmp_path, "hello.py", "")
            where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc", "1")
            jobs = [start_ddplaunch("run", *where, "--node-rank", str(rank), "hello.py") for rank in (0, 1)]
        else:
            jobs = [step({**slurm(rank)}, "--master-port", str(port), "--nproc", "1") for rank in (0, 1)]
        assert [job.wait(30) for job in jobs] == [2, 2]
    assert f"Error: --master-port {port} is in use by" in jobs[0].stderr()
    assert f"Error: node 0 ({HOST}): --master-port {port} is in use by" in jobs[1].stderr()
