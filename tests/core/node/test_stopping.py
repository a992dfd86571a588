"""Tests that nothing of a job is left, however it ends, with real process trees."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.base.text import signal_name
from ddplaunch.core.node.attempt_machine import LEFTOVER_GRACE_S
from ddplaunch.observe.history import history_store
from ddplaunch.system.processes.proc_utils import KILL_TIMEOUT_S, catches_signal, list_descendants
from tests.conftest import (
    PROGRAMS,
    clean_environment,
    ddplaunch_command,
    find_leftover_processes,
    find_marked_processes,
    free_port,
    is_alive,
    run_command,
    wait_until,
    wait_until_idle,
    write_program,
)
from tests.constant_override import launcher_with_constant, write_launcher
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC, FORKED, LIGHT
from tests.suite.cleanup_process import FREEZER, FROZEN_GROUP

SLEEPER = PROGRAMS / "sleeper.py"


@pytest.fixture(params=[FORKED, EXEC], ids=["zygote", "exec"])
def mode(request):
    return request.param


@pytest.mark.smoke
def test_launcher_killed(start_ddplaunch, mode):
    """kill -9 of the launcher takes the ranks, all their descendants, whatever their session, and temporary files."""
    job = start_ddplaunch("run", *mode, "--nproc", "3", SLEEPER, "children")
    job.wait_for("ready", 3)
    wait_until(lambda: len(job.left()) >= 2 + 3 + 3 * 4, "launcher, zygote; ranks; what each starts")
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.assert_nothing_left()


def test_a_killed_zygote_takes_its_ranks_and_uses_a_restart(start_ddplaunch):
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--max-restarts", "1", SLEEPER, "children")
    job.wait_for("ready", 2)
    os.kill(job.zygote(), signal.SIGKILL)
    job.wait_for("ready", 4)
    assert re.search(r"the zygote \(pid \d+\) was ended by SIGKILL.*\n.*restart 1 of 1", job.stderr())
    os.kill(job.zygote(), signal.SIGKILL)
    assert job.wait() == 137
    assert re.search(r"the zygote \(pid \d+\) .*; no restarts left \(--max-restarts 1\)", job.stderr())
    assert "Traceback" not in job.stderr()
    job.assert_nothing_left()


def test_unrelated_processes_survive_a_killed_zygote(start_ddplaunch, tmp_path):
    """What the shell had started before it became the launcher goes on, with whatever came of it meanwhile."""
    (tmp_path / "shell").write_text(
        """
        cd "$(dirname "$0")"
        (sleep 1000 & echo $! > before; until [ -e killed ]; do sleep 0.01; done; setsid sleep 1000 & echo $! > later) &
        exec "$@"
        """
    )
    mark = uuid.uuid4().hex
    words = ["sh", str(tmp_path / "shell"), *ddplaunch_command("run", *FORKED, "--nproc", "2", SLEEPER, "children")]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            words, cwd=tmp_path, env=clean_environment({"DDPLAUNCH_TEST_MARK": mark}), stdout=out, stderr=out
        )
    try:
        wait_until(lambda: (tmp_path / "out").read_text().count("ready") == 2, "the ranks")
        (zygote,) = find_marked_processes(mark, "zygote.py")
        os.kill(zygote, signal.SIGKILL)
        assert job.wait(scaled_timeout(30)) == 137, (tmp_path / "out").read_text()
        (tmp_path / "killed").touch()
        later = tmp_path / "later"
        wait_until(lambda: later.exists() and later.read_text(), "the next unrelated process")
        unrelated = {int((tmp_path / name).read_text()) for name in ("before", "later")}
        wait_until(lambda: set(find_leftover_processes(mark)) == unrelated, "the end of all others")
    finally:
        (tmp_path / "killed").touch()
        for pid in find_leftover_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.slow
def test_launcher_killed_while_the_zygote_imports(start_ddplaunch):
    job = start_ddplaunch("run", "--nproc", "2", SLEEPER)
    wait_until(lambda: len(job.left()) == 2, "the zygote")
    job.signal(signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


@pytest.mark.smoke
def test_interrupt_reaches_the_program(start_ddplaunch, mode):
    """Ctrl-C is KeyboardInterrupt in each rank, so its except and finally run; each prints in one line where it was."""
    job = start_ddplaunch("run", *mode, "--nproc", "3", SLEEPER, "finally")
    job.wait_for("ready", 3)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.stdout().count("cleaned up") == 3
    lines = sorted(re.sub(r"\d+$", "N", line) for line in job.stderr().splitlines() if "KeyboardInterrupt" in line)
    assert lines == [f"[{rank}] KeyboardInterrupt: {SLEEPER}:N" for rank in range(3)]
    assert "Traceback" not in job.stderr()
    assert "ddplaunch: stopping 3 ranks; Ctrl-C again kills them now\n" in job.stderr()
    job.assert_nothing_left()


def test_suspended_ranks_handle_sigterm(start_ddplaunch):
    """SIGCONT follows the signal."""
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--grace", "600", SLEEPER, "finally")
    job.wait_for("ready", 2)
    for pid in job.ranks():
        os.kill(pid, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_suspended_zygote_is_noted_and_killed_at_the_end(start_ddplaunch, tmp_path):
    """It is noted also without the samples of the history."""
    assert KILL_TIMEOUT_S == 5
    sooner = launcher_with_constant(tmp_path, "system.processes.proc_utils.KILL_TIMEOUT_S", scaled_timeout(0.5))
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--no-history", "--grace", "0", SLEEPER, executable=sooner)
    job.wait_for("ready", 2)
    os.kill(zygote := job.zygote(), signal.SIGSTOP)
    wait_until(lambda: f" (pid {zygote}) is stopped" in job.stderr(), "the note")
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.signal(signal.SIGTERM)
    assert job.wait() in (143, 137)
    assert job.stderr().count(f"kill -CONT {zygote}\n") == 1
    job.assert_nothing_left()


def test_children_live_while_a_checkpoint_is_written(start_ddplaunch):
    """Only the leaders get SIGTERM: a DataLoader's workers must serve until the checkpoint is done.

    The zygote may get it too: systemd, and Slurm with proctrack/linuxproc, signal every process of a job.
    """
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", SLEEPER, "checkpoint")
    job.wait_for("ready", 2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(job.zygote(), number)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.stdout().count("checkpoint with its child alive") == 2
    job.assert_nothing_left()


def test_an_ignored_sighup_stays_ignored(start_ddplaunch):
    """nohup relies on that: closing the terminal does not end the job."""
    job = start_ddplaunch(
        "run", *LIGHT, "--nproc", "2", SLEEPER, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None
    )
    job.wait_for("ready", 2)
    job.signal(signal.SIGHUP)
    ignored = int(Path(f"/proc/{job.process.pid}/status").read_text().partition("SigIgn:\t")[2].split()[0], 16)
    assert ignored >> (signal.SIGHUP - 1) & 1
    assert job.process.poll() is None
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def test_ranks_inherit_signals_that_the_launcher_resets_for_itself(start_ddplaunch, mode, tmp_path):
    """SIGCHLD ignored, SIGTERM blocked: the job starts and ends, and its program can wait for SIGTERM by sigwait."""
    text = """
        import signal

        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGTERM, signal.SIGUSR1}, flush=True)
        print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN, flush=True)
        print(f"waited for {signal.sigwait((signal.SIGTERM,)).name}")
    """
    write_program(tmp_path, "t.py", text)

    def inherit() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))

    job = start_ddplaunch("run", *mode, "--nproc", "2", "t.py", preexec_fn=inherit)
    job.wait_for("True", 4)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.stdout().count("waited for SIGTERM") == 2
    job.assert_nothing_left()


def test_leftover_processes_of_successful_ranks_are_killed_and_named(start_ddplaunch):
    assert LEFTOVER_GRACE_S == 5  # at most: a shorter --grace counts
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--grace", "0.5", SLEEPER, "children", "return")
    assert job.wait() == 0
    assert "killed leftover processes of the ranks" in job.stderr()
    assert "sleep" in job.stderr()
    job.assert_nothing_left()


def test_adopted_orphans_are_reaped_while_the_job_runs(start_ddplaunch):
    """Daemons that ranks start and that end do not pile up as zombies."""
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", SLEEPER, "daemons")
    job.wait_for("daemon", 2)
    daemons = [int(line.split()[-1]) for line in job.stdout().splitlines() if "daemon" in line]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in daemons), "the daemons to be reaped")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


def _freezer() -> Path | None:
    """A cgroup v1 freezer that we may use: a frozen process is in state D, and no signal ends it."""
    root = Path(FREEZER)
    return root if os.access(root, os.W_OK) and (root / "cgroup.procs").exists() else None


@pytest.mark.ci
@pytest.mark.skipif(_freezer() is None, reason="needs a writable cgroup v1 freezer to make a process unkillable")
def test_a_rank_that_cannot_be_killed_is_reported_and_not_waited_for(start_ddplaunch):
    root = _freezer()
    assert root is not None
    group = root / f"{FROZEN_GROUP}{os.getpid()}"
    group.mkdir()
    try:
        job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "--grace", "0.5", SLEEPER)
        job.wait_for("ready", 2)
        frozen = job.ranks()[1]
        (group / "cgroup.procs").write_text(str(frozen))
        (group / "freezer.state").write_text("FROZEN")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "not waiting for processes that cannot be killed" in job.stderr()
        assert f"pid {frozen}" in job.stderr()
        assert is_alive(frozen)
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the frozen rank to die")
        group.rmdir()


def test_without_home_and_terminal_in_a_folder_with_spaces(tmp_path, monkeypatch):
    folder = tmp_path / "a folder, with 'quotes'"
    folder.mkdir()
    (folder / "my script.py").write_text("import os, sys; print(sys.argv, os.getcwd())")
    run = f"no-home-{os.getpid()}"
    done = subprocess.run(
        [*ddplaunch_command(), "run", *LIGHT, "--run-id", run, "--nproc", "2", "my script.py", "an arg"],
        cwd=folder, env={"PATH": os.environ["PATH"]}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        start_new_session=True, timeout=scaled_timeout(90),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"['my script.py', 'an arg'] {folder}") == 2
    monkeypatch.delenv("XDG_STATE_HOME")
    shutil.rmtree(history_store.run_dir(f"{run}.1"))  # it was kept in the home that this user has by /etc/passwd


def test_closed_standard_streams(tmp_path):
    """A daemon may start the launcher with descriptors 0 to 2 closed."""
    script = tmp_path / "touch.py"
    script.write_text("import os, pathlib; print('x'); pathlib.Path('done' + os.environ['RANK']).touch()")
    words = " ".join([*ddplaunch_command(), "run", *LIGHT, "--nproc", "2", str(script)])
    done = subprocess.run(["sh", "-c", f"exec {words} <&- >&- 2>&-"], cwd=tmp_path, timeout=scaled_timeout(90))
    assert done.returncode == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv to leave it")
def test_a_job_of_an_unprivileged_user(tmp_path):
    """Without root's rights the job works, and leaves nothing. (The right to read is kept: Python may be root's.)"""
    tmp_path.chmod(0o777)
    script = tmp_path / "who.py"
    script.write_text("import os; print('user', os.getuid())")
    other = ["--reuid=65534", "--regid=65534", "--clear-groups"]
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    words = ["setpriv", *other, *rights, *ddplaunch_command("run", *LIGHT, "--nproc", "2", script)]
    done = run_command(words, tmp_path, {"TMPDIR": str(tmp_path)})
    assert done.stdout.count("user 65534") == 2, done.stderr
    assert not list(tmp_path.glob("ddplaunch-*"))


@pytest.mark.slow
def test_idle_launcher_never_wakes_up(start_ddplaunch):
    """While ranks sleep, launcher and zygote sleep in the kernel: no context switch of their own.

    With a history, the launcher takes samples: tests/observe/history/test_sample_file.py.
    """
    job = start_ddplaunch("run", *FORKED, "--nproc", "2", "--no-history", SLEEPER)
    job.wait_for("ready", 2)
    wait_until_idle(job.process.pid, job.zygote())
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


WITHOUT_MAIN_THREAD = """
import ctypes, os, signal, sys, threading, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
libc = ctypes.CDLL(None)
if os.environ["RANK"] == "1":
    ready = threading.Event()
    threading.Thread(target=lambda: (print(os.getpid(), flush=True), ready.set(), libc.sleep(600))).start()
    ready.wait()
    open("alone", "w").close()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit(2): this thread alone
while not (os.path.exists("alone") and main_is_gone()):
    time.sleep(0.01)
raise ValueError("boom")
"""

MAIN_IS_GONE = """
def main_is_gone():
    import glob
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = open(path).read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == os.getppid() and int(fields[17]) > 1:
            return True
    return False
"""


def test_a_rank_whose_main_thread_has_ended_is_killed(start_ddplaunch, tmp_path):
    """The kernel shows it as a zombie, but its other threads live and would stay. The grace expires here too."""
    write_program(tmp_path, "alone.py", MAIN_IS_GONE + WITHOUT_MAIN_THREAD)
    job = start_ddplaunch("run", *FORKED, "--nproc", "2", "--grace", "0.5", "alone.py")
    assert job.wait() == 1, job.stderr()
    assert "ValueError: boom" in job.stderr()
    job.assert_nothing_left()
    (pid,) = re.findall(r"^\[1\] (\d+)$", job.stdout(), re.MULTILINE)
    assert not os.path.exists(f"/proc/{pid}")


def test_ctrl_c_skips_the_grace_of_leftover_processes(start_ddplaunch, tmp_path):
    """The zygote takes a second request while it waits for them."""
    write_program(tmp_path, "child.sh", "trap 'touch sigterm' TERM\ntouch ready\nwhile :; do sleep 0.01; done\n")
    leaves = "sh child.sh >/dev/null 2>&1 & until [ -e ready ]; do sleep 0.01; done"
    later = launcher_with_constant(tmp_path, "core.node.attempt_machine.LEFTOVER_GRACE_S", 600.0, "DRAIN_TIMEOUT_S")
    words = ("--nproc", "2", "--grace", "600", "--no-python", "sh", "--", "-c", leaves)
    job = start_ddplaunch("run", *words, executable=later)
    wait_until((tmp_path / "sigterm").exists, "SIGTERM for the leftover process")
    job.signal(signal.SIGINT)
    job.wait()
    job.assert_nothing_left()


CATCHES = """
    import os, signal, time

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGRTMIN + 2, signal.SIGRTMAX]
    seen = []
    if os.environ["RANK"] != "0":
        for number in numbers:
            signal.signal(number, lambda number, frame: seen.append(int(number)))
    print("ready", flush=True)
    while not os.path.exists("leave"):
        for number in seen[:]:
            print(f"<{seen.pop(0)}>", flush=True)
        time.sleep(0.02)
"""


def count(text: str, *numbers: int) -> list[int]:
    return [text.count(f"<{int(number)}>") for number in numbers]


def test_a_signal_for_the_ranks(start_ddplaunch, tmp_path):
    """Ranks with a handler get it, once, and it ends no process; two real-time signals are for stacks."""
    write_program(tmp_path, "t.py", CATCHES)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "3", "--preempt-signal", "none", "t.py", start_new_session=True)
    job.wait_for("ready", 3)
    sent = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGRTMIN + 2, signal.SIGRTMAX)
    for number in (signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGXCPU, *sent):
        job.signal(number)
        if number in sent:  # at once they may come too deep for the stack that faulthandler gives handlers
            wait_until(lambda number=number: count(job.stdout(), number) == [2], f"signal {number}")
    os.killpg(job.process.pid, signal.SIGUSR1)
    wait_until(lambda: count(job.stdout(), signal.SIGUSR1) == [4], "that to the group")
    (tmp_path / "leave").touch()
    assert job.wait() == 0, job.stderr()
    assert count(job.stdout(), *sent) == [4, 2, 2, 2, 2, 2]
    unhandled = (signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGXCPU)
    notes = [f"ddplaunch: {signal_name(each)}: no rank handled it" for each in unhandled]
    assert sorted(job.stderr().splitlines()) == sorted(notes)


HANDLES_LATE = """
    import os, signal, time

    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGUSR1, lambda number, frame: print("<saved>", flush=True))
        print("handles", flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.02)
"""


@pytest.mark.parametrize("moment", ["before the ranks", "before the handler"])
def test_a_signal_that_comes_before_the_handler_is_delivered(start_ddplaunch, tmp_path, moment):
    write_program(tmp_path, "t.py", HANDLES_LATE)
    write_program(tmp_path, "slow.py", "import os, time\nwhile not os.path.exists('loaded'): time.sleep(0.01)\n")
    job = start_ddplaunch("run", "--start", "zygote", "--preload", "slow", "--nproc", "2", "t.py")
    if moment == "before the ranks":
        wait_until(lambda: catches_signal(job.process.pid, signal.SIGUSR1), "the launcher's handler")
    else:
        (tmp_path / "loaded").touch()
        job.wait_for("up", 2)
    job.signal(signal.SIGUSR1)
    (tmp_path / "loaded").touch()
    (tmp_path / "go").touch()
    job.wait_for("<saved>")
    (tmp_path / "leave").touch()
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("<saved>") == 1
    assert "no rank" not in job.stderr()


SIGNALS_PARENT = """
    import os, signal, subprocess, sys, time

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("saved"))
    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        number = int(sys.argv[1])
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        os.kill(0, signal.SIGUSR1)
        if sys.argv[2:]:
            subprocess.run(["sh", "-c", f"kill -{number} {os.getppid()}; sleep 600"])  # its pid leads to the rank
        else:
            os.kill(os.getppid(), number)
    time.sleep(600)
"""


@pytest.mark.parametrize(("number", "mode", "child"), [(signal.SIGTERM, LIGHT, ()), (signal.SIGHUP, EXEC, ("child",))])
def test_a_rank_may_end_the_job_by_a_signal_to_its_parent(start_ddplaunch, tmp_path, number, mode, child):
    """Watchdogs in programs do that; a signal to the rank's own process group ends no other process."""
    write_program(tmp_path, "t.py", SIGNALS_PARENT)
    job = start_ddplaunch("run", *mode, "--nproc", "2", "t.py", str(int(number)), *child)
    job.wait_for("up", 2)
    (tmp_path / "go").touch()
    assert job.wait() == 128 + number
    assert job.stderr().count(f"ddplaunch: rank 1 sent {number.name} to its parent process: stopping 2 ranks\n") == 1
    assert f"ddplaunch: stopped because rank 1 sent {number.name} to its parent process\n" in job.stderr()
    job.assert_nothing_left()


def test_suspend_and_continue(start_ddplaunch, tmp_path):
    """Ctrl-Z stops the ranks too, though they are in sessions of their own; fg continues them.

    Each rank gets one SIGCONT, though the launcher gets one too.
    """

    def states():
        stat = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in (job.process.pid, *ranks)
        ]
        return "".join(stat)

    write_program(tmp_path, "t.py", CATCHES)
    job = start_ddplaunch("run", *LIGHT, "--nproc", "2", "t.py")
    job.wait_for("ready", 2)
    ranks = job.ranks()
    job.signal(signal.SIGTSTP)
    wait_until(lambda: states() == "TTT", "all to be stopped")
    job.signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states(), "all to go on")
    wait_until(lambda: count(job.stdout(), signal.SIGCONT) == [1], "the signal")
    job.signal(signal.SIGUSR1)
    wait_until(lambda: count(job.stdout(), signal.SIGUSR1) == [1], "what came later")
    (tmp_path / "leave").touch()
    assert job.wait() == 0
    assert count(job.stdout(), signal.SIGCONT) == [1]


ALL_CATCH = CATCHES.replace('if os.environ["RANK"] != "0":', "if True:")


def signal_all_processes(job, number):
    """Signal all processes of a job's node, children first, as Slurm may do."""
    for pid in (*reversed(list_descendants(job.process.pid)), job.process.pid):
        with suppress(ProcessLookupError):  # of what records the run, which ends when it has done so
            os.kill(pid, number)


def test_a_signal_to_every_process_reaches_ranks_once(start_ddplaunch, tmp_path):
    """A signal while the zygote imports does not end it."""
    write_program(tmp_path, "t.py", ALL_CATCH)
    write_program(
        tmp_path,
        "slow.py",
        """
        import os, time

        open("here", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        """,
    )
    launcher = write_launcher(  # a zygote without a core reports late that it got a signal too
        tmp_path,
        f"""
        from ddplaunch.core.node import signals
        from ddplaunch.core.node import machine

        machine.ZYGOTE_REPORT_DELAY_S = {scaled_timeout(1)}
        signals.DUPLICATE_WINDOW_S = 600.0  # a report is kept for three of these
        """,
    )
    words = ("--preload", "slow", "--nproc", "2", "--preempt-signal", "none", "t.py")
    job = start_ddplaunch("run", *words, env={"PYTHONPATH": str(tmp_path)}, executable=launcher)
    wait_until((tmp_path / "here").exists, "the import")
    signal_all_processes(job, signal.SIGUSR1)
    (tmp_path / "go").touch()
    job.wait_for("ready", 2)
    sent = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGRTMIN + 2)
    for number in sent:
        signal_all_processes(job, number)
        wait_until(lambda number=number: count(job.stdout(), number) == [2], f"signal {number}")
    job.signal(signal.SIGUSR1)
    wait_until(lambda: count(job.stdout(), signal.SIGUSR1) == [4], "one to the launcher alone")
    (tmp_path / "leave").touch()
    assert job.wait() == 0, job.stderr()
    assert count(job.stdout(), *sent) == [4, 2, 2, 2]


@pytest.mark.ci
def test_a_signal_for_the_ranks_of_all_nodes(start_ddplaunch, tmp_path):
    """Each rank gets it once: from its own node, another node, both, or as one of all processes of a node."""
    write_program(tmp_path, "t.py", ALL_CATCH)
    port = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = ("--nnodes", "2", "--nproc", "2", "--preempt-signal", "none", *port, *LIGHT, "t.py")
    jobs = [start_ddplaunch("run", "--node-rank", rank, *words) for rank in "01"]
    for job in jobs:
        job.wait_for("ready", 2)

    def printed(number: int) -> list[int]:
        return [count(job.stdout(), number)[0] for job in jobs]

    jobs[1].signal(signal.SIGUSR1)
    wait_until(lambda: printed(signal.SIGUSR1) == [2, 2], "the signal to node 1")
    for job in jobs:
        job.signal(signal.SIGUSR1)
    wait_until(lambda: printed(signal.SIGUSR1) == [4, 4], "the signal to both")
    signal_all_processes(jobs[0], signal.SIGUSR2)
    wait_until(lambda: printed(signal.SIGUSR2) == [2, 2], "the signal to all processes of node 0")
    (tmp_path / "leave").touch()
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr() + jobs[1].stderr()
    assert [printed(each) for each in (signal.SIGUSR1, signal.SIGUSR2)] == [[4, 4], [2, 2]]
