"""Tests that a new check needs its file, a line in ``node_checks`` and its fields, in a copy of the package."""

import pytest

from tests.conftest import ddplaunch_command, run_command, write_program
from tests.package_copy import copy_package

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
    doctor = copy_package(tmp_path) / "features" / "doctor"
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
    page = run_command(ddplaunch_command("doctor"), "/", {"PYTHONPATH": str(tmp_path)}).stdout
    assert ": 3 toys lie on the floor\n         -> tidy up\n" in page
    assert "toys            3, of wood\n" in page
    assert "ImportError: not today" in page
