"""Tests of the zygote that imports while its run is the next in line, with a stand-in for torch."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.core.agent.zygote_client import make_zygote_config
from ddplaunch.core.agent.zygote_process import ZygoteStartSettings
from ddplaunch.core.rank import zygote_channel
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.reservations.early_zygote import EarlyZygote
from ddplaunch.system.processes.proc_utils import list_children
from tests.conftest import clean_environment, is_alive, wait_until, write_program
from tests.scaled_timeouts import scaled_timeout

pytestmark = pytest.mark.slow

TORCH = """
import os
made = os.getpid()  # of the process that imported it
print("imported", flush=True)

class default_generator:
    seed = staticmethod(int)
"""

PROGRAM = """
import os, torch
print("forked", torch.made == os.getppid(), "sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""

HOLD = ("--nproc", "1", "--no-history", "--no-python", "sh", "-c", 'while [ -e "$1" ]; do sleep 0.02; done', "sh")


@pytest.fixture
def wait_in_line(start_ddplaunch, machine, tmp_path):
    """Start runs on both GPUs of a machine, and some that wait; return these, the machine and the files that hold."""

    def start(count=1):
        write_program(tmp_path, "train.py", PROGRAM)
        write_program(tmp_path, "packages/torch/__init__.py", TORCH)
        env = {**machine(2), "PYTHONPATH": str(tmp_path / "packages")}
        files = [tmp_path / "first", tmp_path / "second"]
        for number, file in enumerate(files):
            file.touch()
            holder = start_ddplaunch("run", "--gpus", str(number), *HOLD, file, env=env)
            wait_until(lambda holder=holder: list_children(holder.process.pid), "a rank")
        waiting = []
        for _ in range(count):
            words = ("run", "--gpus", "free:1", "--wait", "10m", "--no-history", "train.py")
            waiting.append(job := start_ddplaunch(*words, env=env))
            wait_until(lambda job=job: "waiting for 1 free GPU" in job.stderr(), "its place in the line")
        return waiting, files

    return start


def zygote_of(job):
    """The process that has imported for a run that waits."""
    wait_until(lambda: "imported" in job.stdout(), f"the import: {job.stderr()}")
    return list_children(job.process.pid)[0]


@pytest.mark.ci
def test_only_the_next_run_imports_while_it_waits(wait_in_line):
    (job, other), files = wait_in_line(2)
    zygote = zygote_of(job)
    assert list_children(other.process.pid) == []
    files[1].unlink()  # not the GPU that was assumed
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("imported") == 1
    assert "forked True sees 1\n" in job.stdout()
    wait_until(lambda: not is_alive(zygote), "the end of the zygote")
    assert other.wait() == 0, other.stderr()
    assert "forked True sees 1\n" in other.stdout()
    files[0].unlink()


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_zygote_ends_with_a_run_that_is_stopped_in_the_line(wait_in_line, number):
    (job,), _ = wait_in_line()
    zygote = zygote_of(job)
    job.process.send_signal(number)
    assert job.wait() != 0
    wait_until(lambda: not is_alive(zygote), "the end of the zygote")


@pytest.mark.ci
def test_a_zygote_that_was_killed_in_the_line_is_replaced(wait_in_line):
    (job,), files = wait_in_line()
    os.kill(zygote_of(job), signal.SIGKILL)
    files[0].unlink()
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("imported") == 2
    assert "forked True sees 0\n" in job.stdout()


@pytest.mark.ci
def test_a_program_that_was_edited_in_the_line_is_planned_anew(wait_in_line, tmp_path):
    (job,), files = wait_in_line()
    zygote_of(job)
    write_program(tmp_path, "train.py", "print('no torch')")
    files[0].unlink()
    assert job.wait() == 0, job.stderr()
    assert job.stdout().split() == ["imported", "no", "torch"]


@pytest.mark.ci
def test_a_package_that_was_changed_in_the_line_is_imported_again(wait_in_line, tmp_path):
    (job,), files = wait_in_line()
    zygote_of(job)
    write_program(tmp_path, "packages/torch/__init__.py", TORCH.replace("imported", "new version"))
    files[0].unlink()
    assert job.wait() == 0, job.stderr()
    assert re.search(r"imported\nnew version\n.*forked True sees 0\n", job.stdout(), re.DOTALL)
    assert "start over" not in job.stderr()


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"UNREAD": "2"}, "kept"),
        ({"UNREAD": None, "NEW": "1"}, "kept"),
        ({"READ": "2"}, "anew"),
        ({"READ": None}, "anew"),
        ({"NATIVE_THREADS": "2"}, "ended"),
    ],
)
def test_variables_that_an_import_has_read(tmp_path, changes, outcome):
    write_program(tmp_path, "module.py", "import os\nos.environ.get('READ')")
    before = clean_environment({"PYTHONPATH": str(tmp_path), "READ": "1", "UNREAD": "1", "NATIVE_THREADS": "1"})
    plan = ZygotePlan(forks=True, modules=("module",), native_reads="NATIVE_[A-Z]+")
    config = make_zygote_config(plan)
    early = EarlyZygote(ZygoteStartSettings(config, before, "title"))
    pid = early.child_pid
    after = {name: value for name, value in {**before, **changes}.items() if value is not None}
    found = early.get_zygote(config, after)
    assert (found is None) == (outcome == "ended")
    if found:
        process, control = found
        with control:
            control.settimeout(scaled_timeout(60))
            message: Any = zygote_channel.receive_message(control)[0]
            assert (message["op"], message["forks"], message["pid"]) == ("ready", True, pid)
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert (b"waiting_zygote" in words) == (outcome == "kept")
        assert process.wait(scaled_timeout(60)) == 0
    assert not is_alive(pid)


def test_another_plan_ends_it():
    config = make_zygote_config(ZygotePlan(forks=True))
    early = EarlyZygote(ZygoteStartSettings(config, clean_environment(), "title"))
    pid = early.child_pid
    assert early.get_zygote({**config, "sys_path_0": "/other"}, clean_environment()) is None
    assert not is_alive(pid)
    assert early.child_pid is None
    assert early.get_zygote(config, clean_environment()) is None, "it is for the first attempt alone"
