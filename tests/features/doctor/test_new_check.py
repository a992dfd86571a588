"""Tests that a new check needs its file and its lines in ``facts``, in a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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


def test_a_check_is_a_file_and_its_lines_in_facts(tmp_path):
    copy = shutil.copytree(
        Path(ddplaunch.__file__).parent, tmp_path / "ddplaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    doctor = copy / "features" / "doctor"
    write_program(doctor / "checks", "toys.py", TOY)
    facts = (doctor / "node_facts.py").read_text()
    for before, after in (
        ("    torch,\n)", "    torch,\n    toys,\n)"),
        ("network.CHECK)", "network.CHECK, toys.CHECK)"),
        ("    host: TextLine\n", "    host: TextLine\n    toys: Count\n"),
    ):
        assert facts.count(before) == 1
        facts = facts.replace(before, after)
    (doctor / "node_facts.py").write_text(facts)
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
