"""Tests that a dry run takes little longer than the start of an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program

MAX_TIMES = 10
"""A dry run of two nodes with eight ranks each, in CPU times of ``python -c pass``."""

ROUNDS = 9


@pytest.fixture
def seconds(tmp_path: Path):
    """Measure the CPU time of commands in turn; return the least of each: other load of the machine only adds to it."""
    write_program(tmp_path, "train.py", "import torch\n")
    # As after an installation: the bytecode is there.
    environment = clean_environment({"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def measure(*commands: list[str], rounds: int = ROUNDS) -> list[float]:
        times: list[list[float]] = [[] for _ in commands]
        for _ in range(rounds + 1):
            for words, taken in zip(commands, times, strict=True):
                process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                assert process.returncode == 0
                taken.append(usage.ru_utime + usage.ru_stime)
        return [min(taken[1:]) for taken in times]

    return measure


def dry_run(nodes: int) -> list[str]:
    return ddplaunch_command("run", "--dry-run", "--json", "--nnodes", str(nodes), "--nproc", "8", "train.py")


@pytest.mark.ci
@pytest.mark.slow
def test_a_dry_run_is_quick(seconds):
    nothing, two_nodes = seconds([sys.executable, "-c", "pass"], dry_run(2))
    (thousand,) = seconds(dry_run(1000), rounds=3)
    assert two_nodes <= MAX_TIMES * nothing
    # A second on an idle machine of today, where an interpreter starts in 10 to 20 ms.
    assert thousand <= max(1.0, 50 * nothing), os.getloadavg()
