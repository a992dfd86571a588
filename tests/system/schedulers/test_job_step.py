"""Commands on all nodes of a batch job: their exit code, and what an interrupt leaves."""

import os
import sys
from types import SimpleNamespace

import pytest

from ddplaunch.system.schedulers import job_step
from ddplaunch.system.schedulers.scheduler import BatchJobState, side_by_side_command
from tests.conftest import is_alive, run_command, wait_until


def test_a_command_that_has_failed_before_the_last_one_starts():
    commands = [["sh", "-c", "exit 3"], *[["true"]] * 200]
    assert run_command(side_by_side_command(commands)).returncode == 3


def test_commands_run_at_once(tmp_path):
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)
    commands = [["sh", "-c", "echo 1 > a; read x < b; exit 2"], ["sh", "-c", "read x < a; echo 'a  b' > b"]]
    assert run_command(side_by_side_command(commands), tmp_path).returncode == 2


def test_an_interrupt_ends_the_commands_on_all_nodes(monkeypatch):
    pids = []

    class Interrupted:
        @staticmethod
        def write(text):
            pids.extend(map(int, text.split()))
            raise KeyboardInterrupt

    commands = [["sh", "-c", "echo $$; exec sleep 600"]]
    scheduler = SimpleNamespace(
        step_command=lambda *_, **__: (side_by_side_command(commands), None), stderr_prefixes=("qrsh: ",)
    )
    monkeypatch.setattr(job_step, "get_scheduler", lambda job: scheduler)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        job_step.run_on_nodes(SimpleNamespace(), BatchJobState("runs", None), ["ps"], everywhere=True)
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the commands")
