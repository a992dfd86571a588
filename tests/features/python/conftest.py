"""Runs programs that call ``ddplaunch.launch`` or open a session."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SLOW_START, run_command, write_program

HEAD = """
import os, signal, sys, threading, time
from functools import partial
from ddplaunch import LaunchError, RankFailed, Session, launch, launch_async

def rank():
    return int(os.environ["RANK"])
"""

Python = Callable[..., str]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run a program to its end; return its stdout, without messages about a slow start. Nothing of it may stay."""
    made = tmp_path / ("tmp" + 100 * "x")  # longer than the address of a Unix socket may be
    made.mkdir()

    def run(body: str, *, fails: bool = False, **variables: str) -> str:
        script = write_program(tmp_path, "program.py", HEAD + body)
        done = run_command([sys.executable, script], tmp_path, {"TMPDIR": str(made), **variables}, timeout=100)
        assert (done.returncode != 0) is fails, done.stderr
        assert list(made.iterdir()) == []
        return SLOW_START.sub("", done.stderr if fails else done.stdout)

    return run
