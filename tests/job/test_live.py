"""The door of a real run: how it stands, and how it is stopped from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ddplaunch.job import client, folder
from ddplaunch.job.requests.end import StopJob
from ddplaunch.job.requests.status import AskStatus
from ddplaunch.job.status import RankState, State
from tests.conftest import alive, wait_until, write
from tests.starts import FORKED

WAITS = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def door(job) -> str:
    def found() -> list[str]:
        return [path for path in folder.doors() if path.endswith(f".{job.process.pid}")]

    wait_until(found, "its door")
    return found()[0]


@pytest.mark.parametrize("now", [False, True])
def test_a_run_that_is_asked_restarts_and_is_stopped(start, tmp_path, now):
    write(tmp_path, "waits.py", WAITS)
    options = ("--max-restarts", "1", "--min-uptime", "0", "--run-id", "mine", *FORKED)
    job = start("run", "--nproc", "2", *options, "waits.py")
    job.wait_for("up", 2)
    path = door(job)
    status = client.ask(path, AskStatus())
    assert (status.run_id, status.state, status.attempt, status.pid) == ("mine", State.RUNNING, 0, job.process.pid)
    assert all(alive(rank.pid) and rank.state is RankState.RUNNING for rank in status.ranks)
    os.kill(status.ranks[1].pid, signal.SIGKILL)
    job.wait_for("up", 4)
    again = client.ask(path, AskStatus())
    assert (again.state, again.attempt, again.restarts) == (State.RUNNING, 1, 1)
    assert not {rank.pid for rank in status.ranks} & {rank.pid for rank in again.ranks}
    client.ask(path, StopJob(now))
    assert job.wait() == 130
    assert not Path(path).exists()
    job.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_no_more_than_a_socket(start, tmp_path):
    write(tmp_path, "waits.py", WAITS)
    job = start("run", *FORKED, "waits.py")
    job.wait_for("up")
    path = door(job)
    job.signal(signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()
    assert path not in folder.doors()
    assert not Path(path).exists()
