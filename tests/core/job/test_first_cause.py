"""Tests that the report of a job of several nodes names the first cause, also if a launcher fails."""

from __future__ import annotations

import os
import signal

import pytest

from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.core.failures import FailureReport, RankFailure
from tests.conftest import write_program
from tests.constant_override import launcher_with_constant
from tests.core.job.test_joining import Nodes
from tests.start_modes import FORKED

RAISES = """
    import os, pathlib, signal, time

    rank = int(os.environ["RANK"])
    print("up", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    if rank == {first}:
        if {stops}:
            os.kill(os.getppid(), signal.SIGSTOP)
        raise ValueError("the cause")
    if {stops}:
        raise ConnectionError("connection closed by peer")
    time.sleep(600)
"""


@pytest.fixture
def jobs(start_ddplaunch, tmp_path):
    def begin(**filled):
        write_program(tmp_path, "raises.py", RAISES.format(**filled))
        nodes = Nodes(start_ddplaunch, tmp_path, 2, *FORKED, "--grace", "0.5")
        sooner = launcher_with_constant(tmp_path, "core.rank.proc_utils.KILL_TIMEOUT_S", 0.5)
        found = [nodes.start(rank, target="raises.py", executable=sooner) for rank in (0, 1)]
        for each in found:
            each.wait_for("up")
        return found

    return begin


def assert_the_cause(jobs, host: str) -> None:
    for job in jobs:
        assert job.wait(40) == 1, job.stderr()
        assert f"failed with ValueError: the cause (exit code 1) (on {host})" in job.stderr()
        assert "from outside" not in job.stderr()
        job.assert_nothing_left()


@pytest.mark.ci
def test_a_zygote_that_stands_still_while_a_rank_elsewhere_fails(jobs, tmp_path):
    """We end it ourselves, which is no cause of anything."""
    both = jobs(first=0, stops=False)
    os.kill(both[1].zygote(), signal.SIGSTOP)
    (tmp_path / "go").touch()
    assert_the_cause(both, os.uname().nodename)


@pytest.mark.ci
def test_a_rank_that_fails_while_its_own_zygote_stands_still(jobs, tmp_path):
    """Its end is not reported, but what it raised is on record."""
    both = jobs(first=0, stops=True)
    (tmp_path / "go").touch()
    assert_the_cause(both, os.uname().nodename)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_zygote_that_is_killed_uses_a_restart_of_all_nodes(start_ddplaunch, tmp_path, killed):
    write_program(tmp_path, "raises.py", RAISES.format(first=9, stops=False))
    nodes = Nodes(start_ddplaunch, tmp_path, 2, *FORKED, "--max-restarts", "1", "--grace", "0.5")
    both = [nodes.start(rank, target="raises.py") for rank in (0, 1)]
    for job in both:
        job.wait_for("up", 1)
    for code in (None, 137):
        os.kill(both[killed].zygote(), signal.SIGKILL)
        for job in both:
            if code is None:
                job.wait_for("up", 2)
                assert "restart 1 of 1" in job.stderr()
            else:
                assert job.wait(40) == code, job.stderr()
                assert "no restarts left (--max-restarts 1)" in job.stderr()
                job.assert_nothing_left()


def test_a_message_is_cut_between_words():
    """torch's begin with a place in its source, which leaves no room for what they say."""
    first = RankFailure(0, 0, "n0", 7, 0, 1, None, "ValueError: boom", None, 1.0, None)
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
    text = f"RuntimeError: {place}Connection closed by peer [127.0.0.1]:19544. " + "It may have ended. " * 9
    second = RankFailure(1, 1, "n0", 8, 0, 1, None, text, None, 2.0, None)
    (line,) = [
        each for each in render_verdict(FailureReport(first, (), (second,), 0, 2), 1).splitlines() if "then" in each
    ]
    assert line.startswith("  then rank 1 failed: RuntimeError: … Connection closed by peer [127.0.0.1]:19544. It may")
    assert line.endswith((" It…", " may…", " have…", " ended…"))
