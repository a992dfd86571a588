"""Tests of the parts of features in a rank, with a toy feature in a copy of the package."""

import sys
from pathlib import Path

import pytest

from tests.conftest import run_command, write_program
from tests.package_copy import add_feature, copy_package
from tests.start_modes import EXEC, FORKED

FEATURE = """
from ddplaunch.core.feature import Feature, NodeSide, RankSide

class ToySide(NodeSide):
    def make_rank_side(self, ranks, rank):
        return RankSide("features/toy/rank/toy", {"raises": ["begin", "leave", ""][rank.rank]})

class Toy(Feature):
    def make_node_side(self, context):
        return ToySide()

FEATURE = Toy()
"""

SIDE = """
class Side:
    def __init__(self, rank, raises):
        self._raises = raises

    def _note(self, hook):
        print(hook, flush=True)
        if hook == self._raises:
            raise ValueError(f"no {hook}")

    def begin(self):
        self._note("begin")

    def done(self):
        self._note("done")

    def leave(self):
        self._note("leave")
"""


@pytest.mark.ci
@pytest.mark.parametrize("how", [pytest.param(FORKED, id="fork"), pytest.param(EXEC, id="exec")])
def test_a_side_that_raises_is_reported_and_the_program_goes_on(how: tuple[str, ...], tmp_path: Path):
    package = copy_package(tmp_path)
    add_feature(package, "toy", feature=FEATURE)
    (package / "features" / "toy" / "rank").mkdir()
    (package / "features" / "toy" / "rank" / "toy.py").write_text(SIDE)
    write_program(tmp_path, "train.py", "import atexit\natexit.register(print, 'at exit')\nprint('program')")
    words = ["run", *how, "--nproc", "3", "train.py"]
    done = run_command([sys.executable, "-m", "ddplaunch", *words], tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    lines = {rank: [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")] for rank in range(3)}
    hooks = ["begin", "program", "done", "at exit", "leave"]
    assert lines == {0: ["begin", "program", "at exit"], 1: hooks, 2: hooks}
    for rank, hook in ((0, "begin"), (1, "leave")):
        what = (
            f"[{rank}] bug in ddplaunch: features/toy/rank/toy failed in rank {rank} and is left out, the job continues"
        )
        assert what in done.stderr
        assert f"[{rank}] ValueError: no {hook}\n" in done.stderr


WAKES = """
import os

class Side:
    def __init__(self, rank, raises):
        namespaces, self.rank = rank._hidden.record.namespaces, rank
        self.real, namespaces.begin = namespaces.begin, self.wake

    def wake(self):
        os.kill(os.getpid(), self.rank.endpoint.wake_signal)
        self.real()
"""


@pytest.mark.ci
def test_a_request_that_arrives_while_modules_are_hidden_changes_no_import(tmp_path: Path):
    """The handler needs ``_socket``, which must not become the program's."""
    package = copy_package(tmp_path)
    add_feature(package, "toy", feature=FEATURE)
    (package / "features" / "toy" / "rank").mkdir()
    (package / "features" / "toy" / "rank" / "toy.py").write_text(WAKES)
    write_program(
        tmp_path,
        "train.py",
        "import sys\nprint('_socket' in sys.modules)\nopen('written', 'w').write('text')\nimport torch",
    )
    done = run_command(
        [sys.executable, "-m", "ddplaunch", "run", "--nproc", "1", "train.py"], tmp_path, {"PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
