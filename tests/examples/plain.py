"""Runs an example by ddplaunch, by plain python or by torchrun; limits threads where several run at once."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import clean_environment, ddplaunch_command
from tests.frameworks.launchers import Done, Launchers

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

ONE_THREAD = {"OMP_NUM_THREADS": Launchers.variables["OMP_NUM_THREADS"]}

PRELOAD = ("--preload", "torch,torch._dynamo,sklearn.datasets")
"""Options that import once for all ranks what most examples need."""

_END = "--- the end of a run"

_IN_TURN = f"""
import json, os, runpy, sys

for sys.argv in json.loads(sys.argv[1]) if len(sys.argv) > 1 else map(json.loads, sys.stdin):
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        print({_END!r}, flush=True)
"""


def run_by_ddplaunch(folder: Path, *words: str | Path) -> str:
    """Run ``ddplaunch run WORDS`` and return its output."""
    return _printed(Launchers(folder).run(ddplaunch_command("run", *words)))


def run_by_python(folder: Path, *words: str | Path) -> str:
    """Run ``python WORDS`` in ``folder``, from which it may import; return its output."""
    return _printed(Launchers(folder).python(*words, env={"PYTHONPATH": str(folder)}))


def run_by_python_in_turn(folder: Path, script: Path, *runs: Sequence[str | Path]) -> list[str]:
    """What ``python SCRIPT WORDS`` prints with the words of each run; one interpreter runs them all.

    That imports torch once, which takes longer than these trainings.
    """
    return _split(run_by_python(folder, "-c", _IN_TURN, _encode([(script, *run) for run in runs])))


@contextmanager
def python_in_turn(folder: Path, script: Path) -> Iterator[Callable[..., str]]:
    """Yield what ``run_by_python_in_turn`` does with one run at a time, between which others may use their files."""
    command = [sys.executable, "-c", _IN_TURN]
    environ = clean_environment({**Launchers.variables, "PYTHONPATH": str(folder)})
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wanted, printed = process.stdin, process.stdout

        def run(*words: str | Path) -> str:
            print(json.dumps([*map(str, (script, *words))]), file=wanted, flush=True)
            output = ""
            while not output.endswith(f"{_END}\n"):
                line = printed.readline()
                assert line, f"it has ended: {output}"
                output += line
            return _split(output)[0]

        yield run
        wanted.close()
        assert process.wait() == 0


def _encode(runs: Sequence[Sequence[str | Path]]) -> str:
    return json.dumps([[*map(str, run)] for run in runs])


def _split(output: str) -> list[str]:
    *outputs, _ = output.split(f"{_END}\n")
    return outputs


def run_by_torchrun(folder: Path, script: Path, *words: str | Path) -> str:
    """Run two ranks by torchrun and return their output."""
    return _printed(Launchers(folder).torchrun(script, *words, env={"PYTHONPATH": str(folder)}))


def _printed(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout
