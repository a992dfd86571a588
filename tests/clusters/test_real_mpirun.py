"""Debian's own Open MPI starts the launchers: each becomes the one rank that it was started for."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.cli.test_several_nodes import SCRIPT
from tests.conftest import PROGRAMS, clean_environment, command, processes_marked, wait_until, write

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="NO OPEN MPI HERE: package openmpi-bin")


@pytest.fixture
def mpirun(tmp_path):
    """Run the command line of a launcher under mpirun; whatever it leaves is found by a mark."""
    mark = os.urandom(8).hex()

    def run(count: int, *words) -> subprocess.CompletedProcess[str]:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return subprocess.run(
            ["mpirun", *root, "--oversubscribe", "-n", str(count), *command("run", *words)],
            cwd=tmp_path,
            env=clean_environment({"DDPLAUNCH_TEST_MARK": mark, "NO_COLOR": "1"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )

    yield run
    wait_until(lambda: not processes_marked(mark), "the end of all that mpirun has started")


def test_four_become_four_ranks(mpirun, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    done = mpirun(4, "train.py")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rstrip() for line in done.stdout.splitlines() if line.strip())
    assert lines == [f"[{rank}] rank {rank} of 4 sum 10" for rank in range(4)]
    assert "openmpi: this is rank 0 of 4, at 127.0.0.1 (OMPI_COMM_WORLD_RANK" in done.stderr


def test_one_that_fails_ends_all_and_is_told_once(mpirun):
    done = mpirun(3, PROGRAMS / "fails.py", "exit", "1")
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("ddplaunch: rank 1 ") == 1
