"""Ranks that stop at breakpoints, and who types to them: fixtures and programs of the debugger's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddplaunch.job.runs import all_running
from tests.conftest import Job, clean_environment, command, processes_marked, wait_until
from tests.emulator import Emulator
from tests.patience import patience

AT = 10 if sys.version_info >= (3, 13) else 11
"""The line at which pdb stops, of STEPS."""

STEPS = """
import os
import sys

rank = int(os.environ["RANK"])


def step(n):
    loss = n + rank // 2
    if os.environ["RANK"] in sys.argv[1:]:
        breakpoint()
    return loss


for n in range(2):
    print("loss", step(n), flush=True)
"""

Person = Callable[..., Emulator]


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Doors of this test alone; a short path, as those of sockets are."""
    path: Path = tmp_path_factory.mktemp("r")
    path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    return path


@pytest.fixture
def person(tmp_path: Path, runtime: Path) -> Iterator[Person]:
    """Type a command of ours at a terminal."""
    begun: list[Emulator] = []

    def begin(*words: str, env: dict[str, str] | None = None, **size: int) -> Emulator:
        marked = {"DDPLAUNCH_TEST_MARK": str(tmp_path), **(env or {})}
        begun.append(Emulator(command(*words), tmp_path, marked, **size))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
    wait_until(lambda: not processes_marked(str(tmp_path)), "the end of all ranks")


def runs(job: Job, run_id: str = "calm") -> None:
    """Wait until its door is there."""
    wait_until(lambda: any(each.run_id == run_id for each in all_running()) or job.process.poll() is not None, run_id)


def piped(tmp_path: Path, lines: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Type lines into ``ddplaunch debug`` from a pipe."""
    return subprocess.run(
        command("debug", *words),
        cwd=tmp_path,
        env=clean_environment({}),
        input=lines,
        capture_output=True,
        text=True,
        timeout=patience(30),
    )
