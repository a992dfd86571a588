"""Tests that a feature can be deleted with its folder and its line in the list, and all others still work."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddplaunch.cli.click_commands import COMMANDS
from tests.conftest import assert_refused, run_command, write_program
from tests.package_copy import PACKAGE, copy_package
from tests.start_modes import FORKED
from tests.test_imports import ALLOWED, FEATURE_IMPORTS

pytestmark = pytest.mark.slow

FOLDERS = sorted(path.name for path in (PACKAGE / "features").iterdir() if (path / "__init__.py").exists())

CORE_IMPORTS = {imported.split(".")[1] for _, imported in ALLOWED}
"""Features that a module below them still imports by name, and that cannot be deleted yet."""


def dependents_of(name: str) -> set[str]:
    """A feature, and those that import it."""
    found, before = {name}, set[str]()
    while found != before:
        before = found
        found = found | {other for other, imported in FEATURE_IMPORTS.items() if imported & found}
    return found


DELETIONS = {name: gone for name in FOLDERS if not (gone := dependents_of(name)) & CORE_IMPORTS}


@contextmanager
def without(package: Path, gone: set[str]) -> Iterator[None]:
    """Take features out of a copy of the package, for a while: their folders and their lines in the list."""
    path = package / "features" / "__init__.py"
    whole = path.read_text()
    aside = package.parent / "aside"
    aside.mkdir()
    for name in gone:
        (package / "features" / name).rename(aside / name)
    path.write_text(re.sub(rf'^    "({"|".join(gone)})",\n', "", whole, flags=re.MULTILINE))
    yield
    path.write_text(whole)
    for name in gone:
        (aside / name).rename(package / "features" / name)
    aside.rmdir()


def commands_of(gone: set[str]) -> list[str]:
    return [name for name, command in COMMANDS.items() if command.module.split(".")[2] in gone]


@pytest.mark.ci
def test_without_a_feature_the_others_work(tmp_path):
    package = copy_package(tmp_path)
    write_program(tmp_path, "train.py", 'import os\nprint("rank", os.environ["RANK"])\n')
    write_program(tmp_path, "fails.py", 'import os\nassert os.environ["RANK"] != "1", "wrong loss"\n')
    environment = {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_command([sys.executable, "-m", "ddplaunch", *words], tmp_path, environment)

    for name, gone in DELETIONS.items():
        print(f"without {name}: also without {', '.join(sorted(gone - {name})) or 'no other'}")
        with without(package, gone):
            done = run("run", "--nproc", "2", *FORKED, "train.py")
            assert (done.returncode, done.stderr) == (0, ""), gone
            assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"], gone

            failed = run("run", "--nproc", "2", *FORKED, "fails.py")
            assert failed.returncode == 1, gone
            assert "ddplaunch: rank 1 failed with AssertionError: wrong loss (exit code 1)" in failed.stderr, gone
            assert "bug in ddplaunch" not in failed.stderr, gone

            helped = run("--help")
            assert helped.returncode == 0, (gone, helped.stderr)
            listed = re.findall(r"^  (\w+)  +[A-Z]", helped.stdout.partition("Options:")[2], re.MULTILINE)
            assert listed == [name for name in COMMANDS if name not in commands_of(gone)], gone

            shown = run("ps", "--all")  # ended runs, too
            assert shown.returncode == 0, (gone, shown.stderr)
            assert "train.py" in shown.stdout, gone

            for name in commands_of(gone):
                assert_refused(run(name), f"{name} is not a command of ddplaunch")
