"""Tests of preemption: which ranks get the notice, how long they have, and how the job ends."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import suppress

import pytest

from ddplaunch.cli import job_launch
from tests.conftest import wait_until, write_program
from tests.start_modes import EXEC, FORKED, LIGHT

POLLS = """
    import sys, time
    from ddplaunch import runtime

    print("ready", flush=True)
    while not runtime.preempted():
        time.sleep(0.01)
    print("saved by", runtime.rank(), flush=True)
"""
"""Ends by itself once it sees the notice."""


@pytest.fixture
def polling_program(tmp_path):
    return write_program(tmp_path, "polls.py", POLLS)


@pytest.fixture(params=[FORKED, EXEC], ids=["zygote", "exec"])
def mode(request):
    return request.param


@pytest.mark.smoke
def test_a_preemption_signal_to_every_process_ends_none(start_ddplaunch, tmp_path, mode):
    """Slurm sends it so; a grandchild in a session of its own, or a shell, has no handler for it."""
    child = """
    import subprocess
    child = subprocess.Popen(["sh", "-c", "echo child; sleep 1000 & wait; echo woken"], start_new_session=True)
    """
    write_program(tmp_path, "t.py", child + POLLS + "    print('child', child.poll())\n    child.kill()\n")
    job = start_ddplaunch("run", *mode, "--nproc", "2", "t.py")
    job.wait_for("ready", 2)
    job.wait_for("child\n", 2)
    wait_until(lambda: len(job.left()) >= 2 + 2 + 4, "launcher, zygote; ranks; what they started")
    for pid in job.left():
        with suppress(ProcessLookupError):  # one may be on its way out
            os.kill(pid, signal.SIGUSR2)
    assert job.wait() == 75
    assert job.stdout().count("child None") == 2
    first, *_, last = job.stderr().splitlines()
    assert first == "ddplaunch: preempted by SIGUSR2: ranks have 90 s (--preempt-grace) to save a checkpoint"
    assert last == "ddplaunch: preempted by SIGUSR2: the same command may be run again (exit code 75)"
    job.assert_nothing_left()


def test_a_notice_before_the_first_rank(start_ddplaunch, polling_program, tmp_path):
    """Ranks that start later find the file; the zygote ignores the signal."""
    write_program(
        tmp_path, "slow.py", "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    job = start_ddplaunch(
        "run", "--nproc", "2", "--preload", "slow", polling_program, env={"PYTHONPATH": str(tmp_path)}
    )
    wait_until(lambda: len(job.left()) == 2, "the zygote")
    zygote = job.zygote()
    wait_until(lambda: _ignores(zygote, signal.SIGUSR2), "the signal to be ignored")
    for pid in job.left():
        os.kill(pid, signal.SIGUSR2)
    wait_until(lambda: "to save a checkpoint" in job.stderr(), "the notice")
    (tmp_path / "go").touch()
    assert job.wait() == 75
    assert job.stdout().count("saved by") == 2
    assert "cannot see" not in job.stderr()


def test_a_blocked_notice_is_pending_until_the_launcher_handles_it(start_ddplaunch, polling_program):
    """A program that starts launchers and forwards notices can block the signal meanwhile."""

    def send_blocked() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2)

    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", polling_program, preexec_fn=send_blocked)
    assert job.wait() == 75, job.stderr()
    assert job.stdout().count("saved") == 2
    job.assert_nothing_left()


def _ignores(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        return bool(int(file.read().partition("SigIgn:\t")[2].split()[0], 16) >> (number - 1) & 1)


def test_preempt_forward_sends_a_signal_when_the_file_exists(start_ddplaunch):
    """A rank that ends on this signal has not failed."""
    script = 'trap "[ -e $DDPLAUNCH_PREEMPTED_FILE ] && echo saved; exit" USR1; echo ready; while :; do sleep 0.1; done'
    job = start_ddplaunch("run", "--nproc", "2", "--preempt-forward", "usr1", "--no-python", "bash", "--", "-c", script)
    job.wait_for("ready", 2)
    job.signal(signal.SIGUSR2)
    assert job.wait() == 75
    assert job.stdout().count("saved") == 2
    assert "exited with" not in job.stderr()


@pytest.mark.parametrize(("name", "mode"), [("USR2", FORKED), ("TERM", EXEC)])
def test_a_handler_of_the_program_gets_the_preemption_signal(start_ddplaunch, tmp_path, mode, name):
    """It gets it once. A rank without one finds the file; a job whose ranks all have one has seen the notice too."""
    text = f"""
        import os, signal, time
        from ddplaunch import runtime

        seen = []
        has_handler = os.environ["RANK"] == "0" or {mode == EXEC}
        if has_handler:
            signal.signal(signal.SIG{name}, lambda number, frame: seen.append(number))
        print("ready", flush=True)
        while not (seen if has_handler else runtime.preempted()):
            time.sleep(0.01)
        print("handled", len(seen), flush=True)
    """
    write_program(tmp_path, "t.py", text)
    job = start_ddplaunch("run", *mode, "--nproc", "2", "--preempt-signal", name, "t.py")
    job.wait_for("ready", 2)
    job.signal(getattr(signal, f"SIG{name}"))
    assert job.wait() == 75
    assert [job.stdout().count(f"handled {times}") for times in (1, 0)] == ([2, 0] if mode == EXEC else [1, 1])


def test_files_for_the_batch_script(start_ddplaunch, tmp_path):
    """Node 0 writes the exit code, and for schedulers other than Slurm a mark for a requeue."""
    write_program(
        tmp_path, "t.py", "import os\nassert 'DDPLAUNCH_EXIT_FILE' not in os.environ\n" + textwrap.dedent(POLLS)
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


def test_exit_file_on_a_full_disk(monkeypatch, capfd):
    monkeypatch.setenv("DDPLAUNCH_EXIT_FILE", "code")
    monkeypatch.setattr(job_launch, "open_for_writing", lambda *_: os.open("/dev/full", os.O_WRONLY))
    job_launch._write_exit_file(3, None)
    assert "cannot write the exit code 3 for the batch script: code: No space left on device" in capfd.readouterr().err


def test_a_launcher_within_a_rank_handles_the_notice(start_ddplaunch, polling_program, tmp_path):
    """It inherits an ignored signal from its rank, and handles it all the same."""
    write_program(
        tmp_path,
        "outer.py",
        f"""
        import subprocess, sys
        words = ["run", *{LIGHT}, "--nproc", "2", {str(polling_program)!r}]
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
