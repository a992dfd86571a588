"""Tests that each command can be deleted with its folder, and all others still work."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddplaunch.cli.click_commands import COMMANDS
from tests.conftest import assert_refused, run_command, write_program
from tests.package_copy import copy_package
from tests.start_modes import FORKED

pytestmark = pytest.mark.slow


def folder_of(module: str) -> str:
    """The folder of a command's feature: "features.runs"."""
    return ".".join(module.split(".")[:2])


BASES = {"features.inspect", "features.runs", "features.ssh", "features.warm", "features.debug"}
"""Features that the core or another feature imports: these cannot be taken away yet."""


FOLDERS: dict[str, list[str]] = {}
for _name, (_module, _) in COMMANDS.items():
    if folder_of(_module) not in {"cli.run_command", *BASES}:
        FOLDERS.setdefault(folder_of(_module), []).append(_name)


@contextmanager
def without(package: Path, gone: str) -> Iterator[None]:
    """Take the folder of some commands out of a copy of the package, and their lines out of the table, for a while."""
    path = package.joinpath(*gone.split("."))
    path = path if path.is_dir() else path.with_suffix(".py")
    table = package / "cli" / "click_commands.py"
    whole = table.read_text()
    aside = path.rename(package.parent / "aside")
    table.write_text(re.sub(rf'^    "\w+": \("{re.escape(gone)}[."].*\n', "", whole, flags=re.MULTILINE))
    yield
    aside.rename(path)
    table.write_text(whole)


@pytest.mark.ci
def test_without_one_the_others_work(tmp_path):
    package = copy_package(tmp_path)
    write_program(tmp_path, "train.py", 'import os\nprint("rank", os.environ["RANK"])\n')
    environment = {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_command([sys.executable, "-m", "ddplaunch", *words], tmp_path, environment)

    for gone, commands in FOLDERS.items():
        with without(package, gone):
            done = run("run", "--nproc", "2", *FORKED, "train.py")
            assert (done.returncode, done.stderr) == (0, ""), gone
            assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"], gone

            helped = run("--help")
            assert helped.returncode == 0, (gone, helped.stderr)
            listed = re.findall(r"^  (\w+)  +[A-Z]", helped.stdout.partition("Options:")[2], re.MULTILINE)
            assert listed == [name for name in COMMANDS if name not in commands], gone

            if "ps" in listed:
                shown = run("ps", "--all")  # what runs no longer, too
                assert shown.returncode == 0, (gone, shown.stderr)
                assert "train.py" in shown.stdout, gone

            for name in commands:
                assert_refused(run(name), f"{name} is not a command of ddplaunch")
