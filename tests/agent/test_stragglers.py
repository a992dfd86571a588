"""A rank that hangs in its last breath is named, with the process to look at."""

from __future__ import annotations

import os
import socket

import pytest

from ddplaunch.agent import stragglers
from tests.conftest import wait_until, write
from tests.control.test_joining import free_port
from tests.impatient import impatient
from tests.patience import patience
from tests.starts import LIGHT

pytestmark = pytest.mark.slow

STRAGGLING = "agent.stragglers.STRAGGLING"

ENDS_WHEN_TOLD = """
    import os

    print(os.environ["RANK"], os.getpid(), flush=True)
    if os.environ["RANK"] in ("0", "3"):
        open("end").close()  # a pipe: until somebody writes
"""


def test_those_that_still_run_are_named_once(start, tmp_path):
    assert stragglers.STRAGGLING == 30
    os.mkfifo(tmp_path / "end")
    script = write(tmp_path, "train.py", ENDS_WHEN_TOLD)
    job = start("run", *LIGHT, "--nproc", "4", script, executable=impatient(tmp_path, STRAGGLING, patience(2)))
    wait_until(job.stderr, "a word on the ranks that still run")
    pids = dict(line.split()[1:] for line in job.stdout().splitlines())
    assert job.stderr() == (
        f"ddplaunch: the other ranks are done; waiting for rank 0 (pid {pids['0']}): train.py:5; "
        f"rank 3 (pid {pids['3']}): train.py:5\n"
    )
    (tmp_path / "end").open("w").close()
    assert job.wait() == 0
    assert job.stderr().count("\n") == 1
    job.assert_nothing_left()


def test_with_several_nodes_its_host_is_named(start, tmp_path):
    """Ranks 0 and 3 still run, one on each of two nodes."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    os.mkfifo(tmp_path / "end")
    script = write(tmp_path, "train.py", ENDS_WHEN_TOLD)
    words = ("--nnodes", "2", *address, *LIGHT, "--nproc", "2")
    sooner = impatient(tmp_path, STRAGGLING, patience(2))
    nodes = [start("run", *words, "--node-rank", rank, script, executable=sooner) for rank in "01"]
    here = f"the other ranks on {socket.gethostname()} are done; waiting for rank"

    def told() -> bool:
        return all(f"{here} {rank} (pid" in node.stderr() for node, rank in zip(nodes, "03", strict=True))

    wait_until(told, "a word on ranks 0 and 3")
    (tmp_path / "end").open("w").close()
    assert [node.wait() for node in nodes] == [0, 0]
    for node in nodes:
        node.assert_nothing_left()
