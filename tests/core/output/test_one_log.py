"""Tests that only node 0 reports events of the job if all nodes print into one log, as under mpirun."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.conftest import free_port, wait_until, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

WAITS = """
    import os

    print("up", flush=True)
    open("gate").close()  # a pipe: until a test writes
    assert os.environ["RANK"] == "0", "only rank 0 does well"
"""


@pytest.fixture
def nodes(start_ddplaunch, tmp_path):
    """Two nodes of one rank each, as mpirun starts them."""
    os.mkfifo(tmp_path / "gate")
    script = write_program(tmp_path, "train.py", WAITS)
    port = str(free_port())
    words = ("run", "--nproc", "1", *LIGHT, "--master-addr", "127.0.0.1", "--master-port", port, "--log-dir", "logs")

    def placed(node: int) -> dict[str, str]:
        per_host = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        return {"OMPI_COMM_WORLD_RANK": str(node), "OMPI_COMM_WORLD_SIZE": "2", **per_host}

    both = [start_ddplaunch(*words, "--run-id", "a", script, env=placed(node)) for node in (0, 1)]
    for node in both:
        node.wait_for("up")
    return both


def ours(job) -> list[str]:
    return [line for line in job.stderr().splitlines() if line.startswith("ddplaunch: ") and "openmpi" not in line]


@pytest.mark.ci
def test_the_failure_report_is_shown_once(nodes, tmp_path):
    with (tmp_path / "gate").open("w"):  # stays open: a rank may print before it opens its end
        assert [node.wait() for node in nodes] == [1, 1]
    host = socket.gethostname()
    first = f"ddplaunch: rank 1 failed with AssertionError: only rank 0 does well (exit code 1) (on {host})"
    assert ours(nodes[0])[0] == first
    kept = [f"ddplaunch: log folder: logs/a/node-1 on {host}"]
    assert ours(nodes[1]) == kept
    assert (tmp_path / "logs/a/node-1/failure.json").exists(), "its own files have all of it"


@pytest.mark.ci
def test_ctrl_c_on_all_nodes_is_reported_once(nodes):
    for node in nodes:
        node.process.send_signal(signal.SIGINT)
    assert [node.wait() for node in nodes] == [130, 130]
    assert sum("Ctrl-C again" in node.stderr() for node in nodes) == 1


@pytest.mark.ci
def test_a_node_without_node_0_reports_itself(nodes):
    nodes[0].process.kill()
    assert nodes[1].wait() == 69
    wait_until(lambda: "node 0 (127.0.0.1) was lost" in nodes[1].stderr(), "why it ended")
    assert any("stopping the ranks here" in line for line in ours(nodes[1]))
