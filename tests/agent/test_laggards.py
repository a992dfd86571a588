"""A rank that hangs in its last breath is named, with the process to look at."""

from __future__ import annotations

import socket

from ddplaunch.agent.laggards import QUIET
from tests.conftest import wait_until, write
from tests.control.test_joining import free_port

ENDS_WHEN_TOLD = """
    import os, time

    print(os.environ["RANK"], os.getpid(), flush=True)
    while os.environ["RANK"] in ("0", "3") and not os.path.exists("end"):
        time.sleep(0.05)
"""


def test_those_that_still_run_are_named_once(start, tmp_path):
    job = start("run", "--nproc", "4", write(tmp_path, "train.py", ENDS_WHEN_TOLD))
    wait_until(job.stderr, "a word on the ranks that still run", QUIET + 60)
    pids = dict(line.split()[1:] for line in job.stdout().splitlines())
    assert job.stderr() == (
        f"ddplaunch: the other ranks are done; waiting for rank 0 (pid {pids['0']}), rank 3 (pid {pids['3']})\n"
    )
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert job.stderr().count("\n") == 1
    job.assert_nothing_left()


def test_with_several_nodes_its_host_is_named(start, tmp_path):
    """Ranks 0 and 3 still run, one on each of two nodes."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = write(tmp_path, "train.py", ENDS_WHEN_TOLD)
    nodes = [start("run", "--nnodes", "2", "--node-rank", rank, *address, "--nproc", "2", script) for rank in "01"]
    here = f"the other ranks on {socket.gethostname()} are done; waiting for rank"
    for node, rank in zip(nodes, "03", strict=True):
        wait_until(lambda: f"{here} {rank} (pid" in node.stderr(), f"a word on rank {rank}", QUIET + 60)  # noqa: B023
    (tmp_path / "end").touch()
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        node.assert_nothing_left()
