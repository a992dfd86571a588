"""Tests that the command for other machines runs ddplaunch itself, whatever files are in the job's folder.

That scripts and pods have this command is tested with them.
"""

import sys
from pathlib import Path

import pytest

from ddplaunch.cli import launcher_command
from tests.conftest import ddplaunch_command, run_command, write_program

OTHERS = ("ddplaunch.py", "json.py", "select.py", "click.py")
TRAIN = "import os; print('trained', os.environ['RANK'], os.environ.get('PYTHONPATH'))"


def run(folder: Path, words: list[str], **variables: str) -> str:
    done = run_command(words, folder, variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder whose files have names of ours, of Python's and of a package that we use."""
    for name in OTHERS:
        write_program(tmp_path, name, f"print('{name} was run'); raise SystemExit(0)")
    write_program(tmp_path, "train.py", TRAIN)
    return tmp_path


@pytest.mark.smoke
@pytest.mark.parametrize("path", ["", "/elsewhere", ":/elsewhere", ".", "link"])
def test_a_ddplaunch_of_the_jobs_folder_is_not_run(folder: Path, path: str) -> None:
    (folder / "link").symlink_to(".")
    for name in ("json.py", "select.py") if path in (".", ":/elsewhere", "link") else ():
        (folder / name).unlink()  # they would be in the way of Python itself
    variables = {"PYTHONPATH": path} if path else {}
    output = run(folder, [*launcher_command(sys.executable), "run", "train.py"], **variables)
    assert output == f"trained 0 {path or None}\n", "and the rank has its variable as it was"


def test_python_m_takes_only_its_own_name_from_there(folder: Path) -> None:
    """``python -m ddplaunch`` imports only a ddplaunch.py from the current folder, and no other module."""
    (folder / "ddplaunch.py").unlink()
    assert run(folder, ddplaunch_command("run", "train.py")) == "trained 0 None\n"
    (folder / "json.py").unlink()
    (folder / "select.py").unlink()
    assert run(folder, ddplaunch_command("run", "train.py"), PYTHONPATH=".") == "trained 0 .\n"
