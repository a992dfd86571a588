"""Runs a program under ddplaunch, under torchrun or alone, and reads what its ranks report."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SLOW_START, clean_environment, ddplaunch_command, run_command, torchrun_command
from tests.fork_server import TORCHRUN
from tests.scaled_timeouts import scaled_timeout

PROGRAMS = Path(__file__).parent / "programs"

TIMEOUT_S = 240
"""Seconds: torchrun's ranks each import the framework, on a machine that does other things too."""

Report = dict[str, Any]
Done = subprocess.CompletedProcess[str]


def requires(*packages: str) -> pytest.MarkDecorator:
    """Skip where one of the packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install -e '.[frameworks]'")


class Launchers:
    """Runs programs in one folder, with nothing downloaded and no file of the user's read.

    Attributes:
        variables: threads that spin while they wait slow each other down tenfold where tests run side by side.
    """

    variables: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ddplaunch(self, *words: str | Path, nproc: int = 2, env: Mapping[str, str] | None = None) -> Done:
        return self.run(ddplaunch_command("run", "--nproc", str(nproc), *words), env)

    def torchrun(self, *words: str | Path, nproc: int = 2, env: Mapping[str, str] | None = None) -> Done:
        """Run torchrun in a fork of an interpreter that has imported it; its ranks are new interpreters, as ever."""
        command = torchrun_command(self.folder, *words, nproc=nproc)
        options = command[command.index("torch.distributed.run") + 1 :]
        return TORCHRUN.run(options, self.folder, clean_environment(self._variables(env)), scaled_timeout(TIMEOUT_S))

    def python(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Done:
        return self.run([sys.executable, *map(str, words)], env)

    def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> Done:
        """Run a command to its end."""
        done = run_command(words, self.folder, self._variables(env), timeout=TIMEOUT_S)
        done.stderr = SLOW_START.sub("", done.stderr)
        return done

    def _variables(self, env: Mapping[str, str] | None) -> dict[str, str]:
        home = {"HOME": str(self.folder), "HF_HOME": str(self.folder / "hf")}
        return {**self.variables, **home, **(env or {})}


@pytest.fixture
def launchers(tmp_path: Path) -> Launchers:
    return Launchers(tmp_path)


def reports(done: Done) -> list[Report]:
    """What the ranks of a job that ended well reported, by rank; torchrun may put two reports on one line."""
    assert done.returncode == 0, done.stderr
    found, at = [], 0
    while (at := done.stdout.find('{"rank"', at)) >= 0:
        report, at = json.JSONDecoder().raw_decode(done.stdout, at)
        found.append(report)
    return sorted(found, key=lambda report: report["rank"])
