"""Tests that the real command gives the same output as the fork that other tests use."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import write_program
from tests.fake_nvml import fake_nvml as fake_nvml

LINES = [
    "run --help",
    "run broken.py",
    "run --dry-run --json --nnodes 2 --nproc 2,1 -m pkg.mod -- --lr 1",
    "run --dry-run --json --nproc_per_node 2 --standalone fn.py:main --steps 3",
    "run --dry-run --nproc gpu train.py",
    "submit --dry-run --nodes 2 --gpus-per-node 4 train.py -- --lr 1",
]


def comparable(text: str) -> str:
    """Without what chance chooses for each run: its id and ports."""
    text = re.sub(r'"run_id": "[\w-]+"', "RUN", text)
    return re.sub(r"\b(?:2\d|3\d)\d{3}\b", "PORT", text)


@pytest.mark.parametrize("line", LINES)
def test_a_fork_answers_as_the_command(line, run_ddplaunch, run_in_fork, fake_nvml, state, tmp_path):
    write_program(tmp_path, "train.py", "")
    write_program(tmp_path, "broken.py", "x = (\n")
    write_program(tmp_path, "pkg/mod.py", "")
    write_program(tmp_path, "fn.py", "def main(steps: int): pass\n")
    env = fake_nvml.environ(2) if "gpu" in line else None
    real, forked = run_ddplaunch(*shlex.split(line), env=env), run_in_fork(*shlex.split(line), env=env)
    assert comparable(forked.stdout) == comparable(real.stdout)
    assert comparable(forked.stderr) == comparable(real.stderr)
    assert forked.returncode == real.returncode
