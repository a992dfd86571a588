"""Tests that a dry run takes about as long as importing a part of the standard library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment, ddplaunch_command, write_program

IMPORTS = "import asyncio, cProfile, doctest, pydoc, sqlite3, tarfile, unittest.mock, xmlrpc.server, zipfile"
"""Work of the same kind, which other load of the machine slows as much; ``pass`` is slowed less."""


@pytest.fixture
def seconds(tmp_path: Path):
    """Measure the CPU time of commands in turn; return the least of each: other load of the machine only adds to it."""
    write_program(tmp_path, "train.py", "import torch\n")
    # As after an installation: the bytecode is there.
    environment = clean_environment({"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def cpu_time(words: list[str]) -> float:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    def measure(*commands: list[str], rounds: int = 9) -> list[float]:
        times = [[cpu_time(words) for words in commands] for _ in range(rounds + 1)]
        return [min(taken) for taken in zip(*times[1:], strict=True)]

    return measure


def dry_run(nodes: int) -> list[str]:
    return ddplaunch_command("run", "--dry-run", "--json", "--nnodes", str(nodes), "--nproc", "8", "train.py")


@pytest.mark.ci
@pytest.mark.slow
def test_a_dry_run_is_quick(seconds):
    for _ in range(3):  # while other tests run, one try may be unfair
        imports, two_nodes = seconds([sys.executable, "-c", IMPORTS], dry_run(2))
        if two_nodes <= 1.1 * imports:
            break
    (thousand,) = seconds(dry_run(1000), rounds=3)
    assert two_nodes <= 1.1 * imports, os.getloadavg()  # 0.92 to 0.99 times on an idle machine; 1.11 at load 7
    # A second on an idle machine of today, where an interpreter starts in 10 to 20 ms.
    assert thousand <= max(1.0, 5 * imports), os.getloadavg()
