"""Running an example by us, by plain python or torchrun; and what helps where several run at once."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import clean_environment, command, torchrun
from tests.patience import patience

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

CALM = {"OMP_NUM_THREADS": "1"}
"""Threads that spin while they wait for each other slow each other down tenfold where tests run side by side."""

PRELOAD = ("--preload", "torch,torch._dynamo,sklearn.datasets")
"""Options that import once for all ranks what most examples need."""

_END = "--- the end of a run"

_IN_TURN = f"""
import json, os, runpy, sys

script = sys.argv[1]
sys.path[0] = os.path.dirname(script)
for words in json.loads(sys.argv[2]):
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    print({_END!r}, flush=True)
"""


def by_us(folder: Path, *words: str | Path) -> str:
    """What ``ddplaunch run WORDS`` prints."""
    return _run(command("run", *words), folder)


def by_python(folder: Path, script: Path, *words: str | Path) -> str:
    """What ``python SCRIPT WORDS`` prints, in ``folder``, which it may import from too."""
    return _run([sys.executable, str(script), *map(str, words)], folder)


def by_python_in_turn(folder: Path, script: Path, *runs: Sequence[str | Path]) -> list[str]:
    """What ``python SCRIPT WORDS`` prints with the words of each run; one interpreter runs them all.

    That imports torch once, which takes longer than these trainings.
    """
    words = json.dumps([[*map(str, run)] for run in runs])
    return _run([sys.executable, "-c", _IN_TURN, str(script), words], folder).split(f"{_END}\n")[:-1]


def by_torchrun(folder: Path, script: Path, *words: str | Path) -> str:
    """What two ranks of torchrun print."""
    return _run(torchrun(folder, script, *words), folder)


def _run(words: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=clean_environment({**CALM, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(150),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
