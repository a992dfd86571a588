"""Fixtures and programs for tests of the debugger: ranks at breakpoints, and a user at a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ddplaunch.cli.lookup.running_jobs import list_running
from tests.conftest import BackgroundJob, ddplaunch_command, list_marked_pids, run_command, wait_until, write_program
from tests.start_modes import LIGHT
from tests.terminal_emulator import TerminalEmulator

TAKEN_OVER = "another terminal has taken over the debugger"

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

StartTerminal = Callable[..., TerminalEmulator]


@pytest.fixture
def runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the control sockets of this test; a short path, as sockets need."""
    path: Path = tmp_path_factory.mktemp("r")
    path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    return path


@pytest.fixture
def debug_terminal(tmp_path: Path, runtime_dir: Path) -> Iterator[StartTerminal]:
    """Start a ddplaunch command in a terminal."""
    begun: list[TerminalEmulator] = []

    def begin(*words: str, env: dict[str, str] | None = None, **size: int) -> TerminalEmulator:
        marked = {"DDPLAUNCH_TEST_MARK": str(tmp_path), **(env or {})}
        begun.append(TerminalEmulator(ddplaunch_command(*words), tmp_path, marked, **size))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
    wait_until(lambda: not list_marked_pids(str(tmp_path)), "the end of all ranks")


@pytest.fixture
def debug_job(
    start_ddplaunch: Callable[..., BackgroundJob], tmp_path: Path, runtime_dir: Path
) -> Callable[..., BackgroundJob]:
    """Start a job with the run id demo whose ranks can be debugged, and wait for its control socket."""

    def begin(
        program: str,
        *arguments: str,
        how: Sequence[str] = LIGHT,
        options: Sequence[str] = ("--debug",),
        env: Mapping[str, str] | None = None,
    ) -> BackgroundJob:
        write_program(tmp_path, "train.py", program)
        words = ("run", "--run-id", "demo", *options, *how, "--nproc", "2", "train.py", *arguments)
        job = start_ddplaunch(*words, env=env)
        wait_until(lambda: debug_socket() or job.process.poll() is not None, "its door")
        return job

    return begin


def debug_socket() -> str:
    """The control socket of the job demo; "" before there is one."""
    return next((each.path for each in list_running() if each.run_id == "demo"), "")


def wait_for_stops(job: BackgroundJob, times: int = 1) -> None:
    """Wait until ranks have stopped as often."""
    wait_until(lambda: job.stderr().count("is at a breakpoint") == times, f"{times} stops")


def pipe_to_debugger(tmp_path: Path, lines: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Type lines into ``ddplaunch debug`` from a pipe."""
    return run_command(ddplaunch_command("debug", *words), tmp_path, input=lines, timeout=30)
