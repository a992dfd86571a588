"""Tests of ``ddplaunch.runtime`` in a program: under ddplaunch, under torchrun, and alone."""

import re
import sys

import pytest

from tests.conftest import ddplaunch_command, run_command, run_in_terminal, torchrun_command, write_program
from tests.start_modes import LIGHT

pytestmark = pytest.mark.slow

SHOWS = """
    import os, sys
    from ddplaunch import runtime

    assert "torch" not in sys.modules or os.environ.get("DDPLAUNCH_DEVICE"), "imported for nothing"
    facts = (runtime.rank(), runtime.local_rank(), runtime.world_size(), runtime.is_main(), runtime.preempted())
    print(f"{facts} {runtime.device()!r}\\n", end="")
"""


def lines(text: str) -> list[str]:
    return sorted(re.sub(r"^\[\d\] ", "", line) for line in text.splitlines())


TWO = ["(0, 0, 2, True, False) device(type='cpu')", "(1, 1, 2, False, False) device(type='cpu')"]


@pytest.mark.parametrize("start", ["zygote", "exec"])
@pytest.mark.smoke
def test_under_ddplaunch(run_ddplaunch, tmp_path, start):
    done = run_ddplaunch("run", "--nproc", "2", "--start", start, write_program(tmp_path, "t.py", SHOWS))
    assert lines(done.stdout) == TWO, done.stderr


@pytest.mark.ci
def test_under_torchrun(tmp_path):
    done = run_command(torchrun_command(tmp_path, write_program(tmp_path, "t.py", SHOWS)), timeout=100)
    assert lines(done.stdout) == TWO, done.stderr


def test_runtime_without_a_launcher(tmp_path):
    done = run_command([sys.executable, write_program(tmp_path, "t.py", SHOWS)], timeout=100)
    assert lines(done.stdout) == ["(0, 0, 1, True, False) device(type='cpu')"], done.stderr


STEPS = """
    import time
    from ddplaunch import runtime

    for step in runtime.progress(range(4), "epoch 1"):
        time.sleep(0.3)
    print("sum", sum(runtime.progress(n for n in range(5))))
"""


def test_progress_in_a_terminal(tmp_path):
    """One line of rank 0's that changes, and is gone in the end; our pipes do not hide that there is a terminal."""
    run = ddplaunch_command("run", *LIGHT, "--no-merge", "--nproc", "2", write_program(tmp_path, "t.py", STEPS))
    found = run_in_terminal(run, tmp_path, {"NO_COLOR": "1"})
    assert re.search(r"\[0\] epoch 1: 2/4, [\d.]+/s, \d+ s left", found), found
    assert not re.search(r"\[1\] epoch", found)
    assert found.count("sum 10") == 2


def test_progress_in_a_log(run_ddplaunch, tmp_path):
    """A line a minute, so none of this short program."""
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", write_program(tmp_path, "t.py", STEPS))
    assert (done.returncode, done.stderr, done.stdout.count("sum 10")) == (0, "", 2)
