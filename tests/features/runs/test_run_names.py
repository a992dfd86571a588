"""Tests of the names of runs: from --name or the target, with a number that is not used again."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddplaunch.system import run_name
from ddplaunch.system.target.target import Target, TargetKind
from tests.conftest import assert_refused, conflict, wait_until, write_program
from tests.start_modes import FORKED

pytestmark = pytest.mark.usefixtures("state")


def list_names(run_in_fork) -> list[str]:
    """The names that ``ps --all`` shows, the latest first."""
    return [line.split()[0] for line in run_in_fork("ps", "--all").stdout.splitlines()[1:]]


def test_runs_are_named_by_target_and_number(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "print('hello')")
    for _ in range(2):
        done = run_ddplaunch("run", *FORKED, "--log-dir", "logs", "train.py")
        assert done.returncode == 0, done
    assert list_names(run_in_fork) == ["train-2", "train-1"]
    assert "log folder: logs/train-2" in done.stderr
    assert "\ntrain-1: succeeded\n" in run_in_fork("report", "train-1").stdout
    assert run_in_fork("logs", "train-2").stdout == "[0] hello\n"
    assert run_in_fork("clean", "train-2").returncode == 0
    run_ddplaunch("run", *FORKED, "train.py")
    assert list_names(run_in_fork) == ["train-3", "train-1"]  # a name is not used again


def test_a_name_is_typed(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "print('hello')")
    for _ in range(2):
        assert run_ddplaunch("run", *FORKED, "--name", "wide", "train.py").returncode == 0
    assert list_names(run_in_fork) == ["wide-2", "wide"]
    done = run_ddplaunch("rerun", "wide")
    assert (done.returncode, list_names(run_in_fork)[0]) == (0, "wide-3")
    assert_refused(
        run_in_fork("run", "--name", "wide", "--run-id", "x", "train.py"), conflict("--name wide", "--run-id x")
    )
    assert_refused(
        run_in_fork("run", "--name", "17", "train.py"), "a number is that of a job or a process", "--name run-17"
    )
    assert_refused(run_in_fork("run", "--name", "a/b", "train.py"), "--name a/b: expected letters, digits, dots")
    assert_refused(run_in_fork("submit", "--name", "a", "train.py"), "--name does not work with", "--job-name")


def test_a_dry_run_uses_no_number(run_in_fork, state, tmp_path):
    write_program(tmp_path, "train.py", "")
    for _ in range(2):
        assert '"run_id": "train-1"' in run_in_fork("run", "--dry-run", "--json", "train.py").stdout
    assert not (state / "ddplaunch").exists()


def test_a_run_without_history_uses_no_number(run_ddplaunch, state, tmp_path):
    write_program(tmp_path, "train.py", "import os; print(os.environ['TORCHELASTIC_RUN_ID'])")
    assert run_ddplaunch("run", *FORKED, "--no-history", "train.py").stdout.removeprefix("[0] ").startswith("20")
    named = run_ddplaunch("run", *FORKED, "--no-history", "--name", "a", "train.py").stdout
    assert named.removeprefix("[0] ") == "a\n"
    assert not state.exists()


def test_the_name_is_the_same_everywhere_while_it_runs(start_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "import sys, time; print('begun', flush=True); time.sleep(600)")
    job = start_ddplaunch("run", *FORKED, "--nproc", "2", "train.py")
    job.wait_for("begun")
    wait_until(lambda: "train-1 " in run_in_fork("ps").stdout, "ps shows the run")
    assert run_in_fork("stop", "train-").returncode == 0
    assert_refused(run_in_fork("stop", "train-1"), "train-1 has ended")


def test_an_id_of_an_earlier_run_is_skipped(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    assert run_ddplaunch("run", *FORKED, "--run-id", "train-1", "train.py").returncode == 0
    assert run_ddplaunch("run", *FORKED, "train.py").returncode == 0
    assert list_names(run_in_fork) == ["train-2", "train-1"]


def test_names_are_reserved_one_by_one(state):
    with ThreadPoolExecutor(16) as threads:
        names = list(threads.map(lambda _: run_name.next_name("train", plain_first=False, reserve=True), range(50)))
    assert sorted(names) == sorted(f"train-{number}" for number in range(1, 51))


def test_a_name_that_cannot_be_reserved_is_random(state, monkeypatch):
    assert run_name.next_name("train", plain_first=False, reserve=True) == "train-1"
    monkeypatch.setattr(run_name, "LOCK_TIMEOUT_S", 0.01)
    fd = os.open(state / "ddplaunch" / "names" / "train", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as by a launcher on a disk that hangs
    try:
        assert run_name.next_name("train", plain_first=False, reserve=True).startswith("20")
    finally:
        os.close(fd)
    assert run_name.next_name("train", plain_first=False, reserve=True) == "train-2"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "/nowhere")
    assert run_name.next_name("train", plain_first=False, reserve=True).startswith("20")


@pytest.mark.parametrize("content", [b"", b"x", b"-4", b"\xff" * 40])
def test_a_file_of_numbers_that_is_damaged(state, content):
    run_name.next_name("train", plain_first=False, reserve=True)
    (state / "ddplaunch" / "names" / "train").write_bytes(content)
    for name in ("train-1", "train-2"):
        assert run_name.next_name("train", plain_first=False, reserve=True) == name


@pytest.mark.parametrize(
    ("kind", "text", "stem"),
    [
        (TargetKind.SCRIPT, "train.py", "train"),
        (TargetKind.SCRIPT, "/home/ada/nets/train.v2.py", "train-v2"),
        (TargetKind.SCRIPT, "01.py", "run-01"),
        (TargetKind.SCRIPT, "größe.py", "gr-e"),
        (TargetKind.SCRIPT, f"{'x' * 100}.py", "x" * 30),
        (TargetKind.MAIN, "nets/", "nets"),
        (TargetKind.MAIN, "nets.zip", "nets"),
        (TargetKind.MODULE, "nets.train", "train"),
        (TargetKind.MODULE, "nets.__main__", "nets"),
        (TargetKind.FUNCTION, "train.py:main", "train"),
        (TargetKind.FUNCTION, "a/train.py:main", "train"),
        (TargetKind.FUNCTION, "nets.train:main", "train"),
        (TargetKind.FUNCTION, "/tmp/ddplaunch-12ab/launch.py:fit", "fit"),
        (TargetKind.PROGRAM, "./prog.sh", "prog"),
        (TargetKind.PROGRAM, "--", "run"),
    ],
)
def test_the_name_of_a_target(kind, text, stem):
    assert run_name.stem_of(Target(kind, text)) == stem
