"""Ranks that stop at breakpoints, and who types to them: fixtures and programs of the debugger's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ddplaunch.job.runs import all_running
from tests.conftest import Job, command, processes_marked, ran, wait_until, write
from tests.emulator import Emulator
from tests.starts import LIGHT

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


@pytest.fixture
def calm(start: Callable[..., Job], tmp_path: Path, runtime: Path) -> Callable[..., Job]:
    """Start a job called calm, whose ranks may be debugged, and wait until it can be asked."""

    def begin(
        program: str,
        *arguments: str,
        how: Sequence[str] = LIGHT,
        options: Sequence[str] = ("--debug",),
        env: Mapping[str, str] | None = None,
    ) -> Job:
        write(tmp_path, "train.py", program)
        words = ("run", "--run-id", "calm", *options, *how, "--nproc", "2", "train.py", *arguments)
        job = start(*words, env=env)
        wait_until(lambda: door() or job.process.poll() is not None, "its door")
        return job

    return begin


def door() -> str:
    """Where the job called calm can be asked; "" before that."""
    return next((each.path for each in all_running() if each.run_id == "calm"), "")


def stopped(job: Job, times: int = 1) -> None:
    """Wait until ranks have stopped as often."""
    wait_until(lambda: job.stderr().count("is at a breakpoint") == times, f"{times} stops")


def piped(tmp_path: Path, lines: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Type lines into ``ddplaunch debug`` from a pipe."""
    return ran(command("debug", *words), tmp_path, input=lines, timeout=30)
