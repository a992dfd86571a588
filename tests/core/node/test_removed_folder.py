"""Tests of jobs whose current folder is removed while they run: a work tree, or what a cleaner of /tmp takes."""

import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.base import safe_files
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.helper_process import HelperProcess
from ddplaunch.system.plan.launch_command import python_command
from tests.conftest import write_program
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import FORKED

PACKAGE = Path(safe_files.__file__).parent.parent

WAITS = """
    import os, sys, time
    print("up", flush=True)
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    while not os.path.exists(sys.argv[1]) and not again:
        time.sleep(0.01)
    if os.environ["RANK"] == "1" and not again:
        raise ValueError("boom")
"""

IN_A_REMOVED_FOLDER = """
    import os, tempfile, threading
    class Exits(Exception):
        def __str__(self):
            raise SystemExit(44)
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    if os.environ["RANK"] == "1":
        {}
    threading.Event().wait(0 if {} else None)
"""


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    folder = tmp_path / "gone"
    folder.mkdir()
    return folder


def test_a_running_job_answers_and_can_be_interrupted(start_ddplaunch, run_in_fork, tmp_path, gone):
    program = write_program(tmp_path, "train.py", WAITS)
    job = start_ddplaunch("run", *FORKED, "--nproc", "2", "--run-id", "gone", program, "end", cwd=gone)
    job.wait_for("up", times=2)
    gone.rmdir()
    stacks = run_in_fork("stacks", "gone")
    assert "ranks 0, 1: " in stacks.stdout, stacks
    assert f"{program}:" in stacks.stdout
    profile = run_in_fork("profile", "gone", "--seconds", "0.5")
    assert f"{program}:" in profile.stdout, profile
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert "Traceback" not in job.stderr()
    assert "bug in ddplaunch" not in job.stderr()


@pytest.mark.parametrize("start", [FORKED, ("--start", "exec")], ids=["forked", "exec"])
def test_a_job_restarts(start, start_ddplaunch, tmp_path, gone):
    program = write_program(tmp_path, "train.py", WAITS)
    words = (*start, "--nproc", "2", "--max-restarts", "1", "--min-uptime", "0")
    job = start_ddplaunch("run", *words, program, tmp_path / "end", cwd=gone)
    job.wait_for("up", times=2)
    gone.rmdir()
    (tmp_path / "end").touch()
    assert (job.wait(), job.stdout().count("up")) == (0, 4), job.stderr()


def test_a_rank_in_a_removed_folder_is_interrupted(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", IN_A_REMOVED_FOLDER.format("raise KeyboardInterrupt", False))
    done = run_ddplaunch("run", *FORKED, "--nproc", "2", "--grace", "1", "train.py")
    assert done.returncode == 130
    assert f"[1] KeyboardInterrupt: {tmp_path / 'train.py'}:9\n" in done.stderr
    assert "ddplaunch/core" not in done.stderr


@pytest.mark.parametrize(
    ("option", "statement", "code"), [("--debug", "breakpoint()", 0), ("--post-mortem", "raise Exits", 1)]
)
def test_a_rank_in_a_removed_folder_stops_for_the_debugger(option, statement, code, run_ddplaunch, tmp_path):
    program = write_program(tmp_path, "train.py", IN_A_REMOVED_FOLDER.format(statement, True))
    done = run_ddplaunch("run", *FORKED, "--nproc", "2", option, "--debug-timeout", "1", "train.py")
    assert done.returncode == code, done.stderr
    assert re.search(f"rank 1 .*{program}:", done.stderr), done.stderr
    assert "bug in ddplaunch" not in done.stderr


def test_a_helper_process_starts_in_a_removed_folder(gone, monkeypatch):
    monkeypatch.chdir(gone)
    gone.rmdir()
    loop, output = EventLoop(), []
    command = python_command(sys.executable, "print('up')")
    helper = HelperProcess(
        loop, command, output.append, partial(pytest.fail, "no output"), deadline=scaled_timeout(30), merge_stderr=True
    )
    while b"" not in output:
        loop.run_once()
    helper.close()
    assert b"".join(output) == b"up\n"


def test_launch_in_a_removed_folder_is_refused(gone, monkeypatch):
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ddplaunch.LaunchError, match="the current folder does not exist any more"):
        ddplaunch.launch(print, nproc=1)


def test_the_current_folder_keeps_its_name(gone, monkeypatch):
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert safe_files.current_folder() == str(gone)


def test_only_what_expects_a_removed_folder_asks_for_the_current_one():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "os.getcwd()" in path.read_text()}
    remote = "system/plan/launch_command.py"  # for another machine, where the folder exists
    assert found == {remote, "__main__.py", "base/safe_files.py", "cli/target_args.py", "core/rank/rank_exit.py"}
