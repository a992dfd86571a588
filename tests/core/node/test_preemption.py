"""Tests of preemption: which ranks get the notice, how long they have, and how the job ends."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import suppress

import pytest

from tests.conftest import wait_until, write_program
from tests.start_modes import EXEC, FORKED, LIGHT

ASKS = """
    import sys, time
    from ddplaunch import runtime

    print("ready", flush=True)
    while not runtime.preempted():
        time.sleep(0.01)
    print("saved by", runtime.rank(), flush=True)
"""
"""Ends by itself when it is time to."""

NEVER_ASKS = """
    import sys, time

    print("ready", flush=True)
    for line in open("/dev/stdin") if sys.argv[1:] == ["stdin"] else iter(lambda: time.sleep(0.1), 1):
        pass
"""


@pytest.fixture
def asks(tmp_path):
    return write_program(tmp_path, "asks.py", ASKS)


@pytest.fixture(params=[FORKED, EXEC], ids=["zygote", "exec"])
def mode(request):
    return request.param


@pytest.mark.smoke
def test_notified_ranks_end_by_themselves(start_ddplaunch, asks, mode):
    job = start_ddplaunch("run", *mode, "--nproc", "2", asks)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert sorted(line for line in job.stdout().splitlines() if "saved" in line) == [
        "[0] saved by 0",
        "[1] saved by 1",
    ]
    assert job.stderr().splitlines() == [
        "ddplaunch: preempted by SIGUSR2: ranks have 90 s (--preempt-grace) to save a checkpoint",
        "ddplaunch: preempted by SIGUSR2: the same command may be run again (exit code 75)",
    ]
    job.assert_nothing_left()


def test_work_that_is_done_is_done(start_ddplaunch, tmp_path):
    """Ranks that finish without asking have not made room: there is nothing to run again."""
    write_program(
        tmp_path,
        "t.py",
        "print('ready', flush=True)\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n",
    )
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "t.py")
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the notice")
    (tmp_path / "go").touch()
    assert (job.wait(), "may be run again" in job.stderr()) == (0, False)


def test_when_the_time_is_over_ranks_are_stopped(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", NEVER_ASKS)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--preempt-grace", "0.1", "t.py")
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert "--preempt-grace (0.1 s) expired" in job.stderr()
    job.assert_nothing_left()


def test_every_process_of_the_job_gets_the_warning(start_ddplaunch, tmp_path, mode):
    """As Slurm does it; a grandchild in a session of its own, or a shell, has no handler for it."""
    child = """
    import subprocess
    child = subprocess.Popen(["sh", "-c", "echo child; sleep 1000 & wait; echo woken"], start_new_session=True)
    """
    write_program(tmp_path, "t.py", child + ASKS + "    print('child', child.poll())\n    child.kill()\n")
    job = start_ddplaunch("run", *mode, "--nproc", "2", "t.py")
    job.wait_for("ready", 2)
    job.wait_for("child\n", 2)
    wait_until(lambda: len(job.left()) >= 2 + 2 + 4, "launcher, zygote; ranks; what they started")
    for pid in job.left():
        with suppress(ProcessLookupError):  # one may be on its way out
            os.kill(pid, signal.SIGUSR2)
    assert job.wait() == 75
    assert job.stdout().count("child None") == 2
    job.assert_nothing_left()


def test_a_warning_before_the_first_rank(start_ddplaunch, asks, tmp_path):
    """Ranks that come to life later find the notice waiting; the process that forks them is not hurt."""
    write_program(
        tmp_path, "slow.py", "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    job = start_ddplaunch("run", "--nproc", "2", "--preload", "slow", asks, env={"PYTHONPATH": str(tmp_path)})
    wait_until(lambda: len(job.left()) == 2, "the zygote")
    zygote = job.zygote()
    wait_until(lambda: _ignores(zygote, signal.SIGUSR2), "its shield")
    for pid in job.left():
        os.kill(pid, signal.SIGUSR2)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the notice")
    (tmp_path / "go").touch()
    assert job.wait() == 75
    assert job.stdout().count("saved by") == 2
    assert "cannot see" not in job.stderr()


def test_a_warning_that_came_blocked_while_the_launcher_started(start_ddplaunch, asks):
    """A program that starts launchers and forwards notices can block the signal until they handle it."""

    def warned() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2)

    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", asks, preexec_fn=warned)
    assert job.wait() == 75, job.stderr()
    assert job.stdout().count("saved") == 2
    job.assert_nothing_left()


def _ignores(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        return bool(int(file.read().partition("SigIgn:\t")[2].split()[0], 16) >> (number - 1) & 1)


def test_a_signal_of_the_users_choice(start_ddplaunch, tmp_path):
    """For code that knows signals only; what it does on this one is to make room."""
    script = 'trap "echo told; exit" USR1; echo ready; while :; do sleep 0.1; done'
    job = start_ddplaunch("run", "--nproc", "2", "--preempt-forward", "usr1", "--no-python", "bash", "--", "-c", script)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert job.stdout().count("told") == 2
    assert "exited with" not in job.stderr()


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_a_handler_of_the_program_gets_the_warning(start_ddplaunch, tmp_path, mode, name):
    """In the ranks that have one, once; another finds the file."""
    text = f"""
        import os, signal, time
        from ddplaunch import runtime

        seen = []
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIG{name}, lambda number, frame: seen.append(number))
        print("ready", flush=True)
        while not (seen if os.environ["RANK"] == "0" else runtime.preempted()):
            time.sleep(0.01)
        print("handled", len(seen), flush=True)
    """
    write_program(tmp_path, "t.py", text)
    job = start_ddplaunch("run", *mode, "--nproc", "2", "--preempt-signal", name, "t.py")
    job.wait_for("ready", 2)
    job.signal(getattr(signal, f"SIG{name}"))
    assert job.wait() == 75
    assert (job.stdout().count("handled 1"), job.stdout().count("handled 0")) == (1, 1)


def test_a_shell_script_looks_for_the_file(start_ddplaunch):
    script = 'echo ready; until [ -e "$DDPLAUNCH_PREEMPTED_FILE" ]; do sleep 0.1; done; exit 75'
    job = start_ddplaunch("run", "--nproc", "2", "--no-python", "sh", "--", "-c", script)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75


def test_ranks_are_not_stopped_for_the_failure_of_another(start_ddplaunch, tmp_path):
    """A rank that ends first breaks the others' collectives, while one may still be writing its checkpoint."""
    first = "if runtime.rank():\n        raise OSError('peer gone')\n    time.sleep(1)\n    "
    write_program(tmp_path, "t.py", ASKS.replace('print("saved', f'{first}print("saved'))
    job = start_ddplaunch("run", *LIGHT, "--nproc", "3", "--max-restarts", "5", "t.py")
    job.wait_for("ready", 3)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert "saved by 0" in job.stdout()
    assert "failed with OSError: peer gone" in job.stderr()
    assert "restart" not in job.stderr()


def test_ctrl_c_after_the_warning(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", NEVER_ASKS)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "t.py")
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the notice")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert "may be run again" not in job.stderr()


def test_a_second_sigterm_stops_a_pod(start_ddplaunch, tmp_path):
    write_program(tmp_path, "t.py", NEVER_ASKS)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--preempt-signal", "TERM", "t.py")
    job.wait_for("ready", 2)
    job.signal(signal.SIGTERM)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the notice")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def test_a_warning_that_is_none(start_ddplaunch, asks):
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--preempt-signal", "none", asks)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)  # is one for ranks that catch it: tests/core/node/test_stopping.py
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "to save a checkpoint" not in job.stderr()
    job.assert_nothing_left()


def test_the_batch_script_learns_the_exit_code(start_ddplaunch, asks, tmp_path):
    """From node 0 alone; the scripts of other schedulers than Slurm, from a mark for a requeue."""
    write_program(
        tmp_path, "t.py", "import os\nassert 'DDPLAUNCH_EXIT_FILE' not in os.environ\n" + textwrap.dedent(ASKS)
    )
    code, mark = write_program(tmp_path, "code", "something older"), tmp_path / "mark"
    variables = {"DDPLAUNCH_EXIT_FILE": str(code), "DDPLAUNCH_REQUEUE_FILE": str(mark)}
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "t.py", env=variables)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert (job.wait(), code.read_text(), mark.exists()) == (75, "75\n", True)
    job = start_ddplaunch(
        "run", "--preempt-grace", "0", "t.py", env={"DDPLAUNCH_EXIT_FILE": str(tmp_path / "no" / "code")}
    )
    job.wait_for("ready")
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    missing = f"{tmp_path}/no/code: No such file or directory"
    assert f"cannot write the exit code 75 for the batch script: {missing}" in job.stderr()


def test_a_launcher_within_a_rank_is_warned_too(start_ddplaunch, asks, tmp_path):
    """It has inherited the shield of the rank that it is, and yet is the one to act."""
    write_program(
        tmp_path,
        "outer.py",
        f"""
        import subprocess, sys
        words = ["run", *{LIGHT}, "--nproc", "2", {str(asks)!r}]
        sys.exit(subprocess.call([sys.executable, "-m", "ddplaunch", *words]))
        """,
    )
    job = start_ddplaunch("run", "outer.py")
    job.wait_for("ready", 2)
    for pid in job.left():
        with suppress(ProcessLookupError):  # one of theirs may be on its way out
            os.kill(pid, signal.SIGUSR2)
    assert job.wait() == 75
    assert job.stdout().count("saved by") == 2
    job.assert_nothing_left()
