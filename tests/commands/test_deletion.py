"""Each command can be taken away, and everything else works: it has a room of its own, which no other one needs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.cli.commands import COMMANDS
from tests.conftest import clean_environment, refused, write
from tests.patience import patience
from tests.starts import FORKED

pytestmark = pytest.mark.slow

PACKAGE = Path(ddplaunch.__file__).parent


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


@pytest.mark.parametrize("gone", ROOMS)
def test_without_it_the_others_work(tmp_path, gone):
    take_away(shutil.copytree(PACKAGE, tmp_path / "ddplaunch"), gone)
    write(tmp_path, "train.py", 'import os\nprint("rank", os.environ["RANK"])\n')
    environment = clean_environment({"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "ddplaunch", *words],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=patience(60), check=False,
        )  # fmt: skip

    ran = run("run", "--nproc", "2", *FORKED, "train.py")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(ran.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]

    helped = run("--help")
    assert helped.returncode == 0, helped.stderr
    listed = re.findall(r"^  (\w+)  +[A-Z]", helped.stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == [name for name in COMMANDS if name not in ROOMS[gone]]

    if "ps" in listed:
        shown = run("ps", "--all")  # what runs no longer, too
        assert shown.returncode == 0, shown.stderr
        assert "train.py" in shown.stdout

    for name in ROOMS[gone]:
        refused(run(name), f"{name} is not a command of ddplaunch")
