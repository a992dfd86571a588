"""Tests that a new check needs its file, a line in ``node_checks`` and its fields, in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import clean_environment, write_program

TOY = """
from ddplaunch.features.doctor.checks import HealthCheck, Severity, Finding


def _read(where):
    return lambda: {"toys": 3}


def _rule(name, facts):
    if facts.toys > 2:
        yield Finding(Severity.NOTE, name, f"{facts.toys} toys lie on the floor", "tidy up")


CHECK = HealthCheck(_read, _rule, {"toys": lambda facts: f"{facts.toys}, of wood"})
"""


@pytest.mark.slow
def test_a_check_is_a_file_a_line_and_its_fields(tmp_path):
    copy = shutil.copytree(
        Path(ddplaunch.__file__).parent, tmp_path / "ddplaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    doctor = copy / "features" / "doctor"
    write_program(doctor / "checks", "toys.py", TOY)
    for name, before, after in (
        ("node_checks.py", "network, torch\n", "network, torch, toys\n"),
        ("node_checks.py", "network.CHECK)", "network.CHECK, toys.CHECK)"),
        ("node_facts.py", "    host: TextLine\n", "    host: TextLine\n    toys: Count\n"),
    ):
        text = (doctor / name).read_text()
        assert text.count(before) == 1
        (doctor / name).write_text(text.replace(before, after))
    write_program(tmp_path, "torch.py", "raise ImportError('not today')\n")  # nothing is measured
    page = subprocess.run(
        [sys.executable, "-m", "ddplaunch", "doctor"],
        cwd="/",
        env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert ": 3 toys lie on the floor\n         -> tidy up\n" in page
    assert "toys            3, of wood\n" in page
    assert "ImportError: not today" in page
