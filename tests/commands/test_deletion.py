"""The commands can be taken away, and everything else works: each has a room of its own, which no other one needs.

tests/test_imports.py holds that none imports another.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.cli.commands import COMMANDS
from tests.conftest import ran, refused, write
from tests.starts import FORKED
from tests.toys import copied

pytestmark = pytest.mark.slow


def room(module: str) -> str:
    """The folder of a command, or its file where it has none, as the table names it: "commands.runs"."""
    return ".".join(module.split(".")[:2])


ROOMS: dict[str, list[str]] = {}
for _name, (_module, _) in COMMANDS.items():
    if room(_module) != "cli.run_command":
        ROOMS.setdefault(room(_module), []).append(_name)


def take_away(package: Path, gone: str) -> None:
    """Remove the room of some commands from a copy of the package, and their lines from the table."""
    path = package.joinpath(*gone.split("."))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.with_suffix(".py").unlink()
    table = package / "cli" / "commands.py"
    kept = re.sub(rf'^    "\w+": \("{re.escape(gone)}[."].*\n', "", table.read_text(), flags=re.MULTILINE)
    table.write_text(kept)


@pytest.mark.parametrize("stays", [None, "commands.runs"])
def test_without_them_the_others_work(tmp_path, stays):
    package = copied(tmp_path)
    gone = [each for each in ROOMS if each != stays]
    for each in gone:
        take_away(package, each)
    write(tmp_path, "train.py", 'import os\nprint("rank", os.environ["RANK"])\n')
    environment = {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return ran([sys.executable, "-m", "ddplaunch", *words], tmp_path, environment)

    done = run("run", "--nproc", "2", *FORKED, "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]

    helped = run("--help")
    assert helped.returncode == 0, helped.stderr
    listed = re.findall(r"^  (\w+)  +[A-Z]", helped.stdout.partition("Commands:")[2], re.MULTILINE)
    taken = [name for each in gone for name in ROOMS[each]]
    assert listed == [name for name in COMMANDS if name not in taken]

    if stays:
        shown = run("ps", "--all")  # what runs no longer, too
        assert shown.returncode == 0, shown.stderr
        assert "train.py" in shown.stdout
    else:
        refused(run("ps"), "ps is not a command of ddplaunch")
