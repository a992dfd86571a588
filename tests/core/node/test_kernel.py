"""Tests of jobs on kernels and in containers that lack system calls or parts of /proc."""

import errno
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import ddplaunch_command, run_command, write_program
from tests.features.warm.conftest import Shell, wait_for_exit
from tests.features.warm.test_kills import begin, run_again
from tests.seccomp import without
from tests.start_modes import FORKED

PIDFDS = ("pidfd_open", "pidfd_send_signal")

TOO_MANY_IN_FLIGHT = """
    import errno, socket
    def send_fds(*arguments):
        raise OSError(errno.ETOOMANYREFS, "")
    socket.send_fds = send_fds
"""
"""In the zygote, the effect of a limit that does not apply to root."""


@pytest.mark.parametrize(
    "without_pidfds",
    [without("ENOSYS", *PIDFDS), without("EPERM", PIDFDS[1]), []],
    ids=["before Linux 5.3", "a container runtime that does not know them", "too many descriptors in flight"],
)
def test_a_failed_job_is_stopped_and_reported_without_pidfds(tmp_path, without_pidfds):
    write_program(tmp_path, "full.py", "" if without_pidfds else TOO_MANY_IN_FLIGHT)
    program = write_program(
        tmp_path, "fails.py", "import os, time\nif os.environ['RANK'] == '1':\n    1 / 0\ntime.sleep(600)\n"
    )
    run = ddplaunch_command("run", "--nproc", "2", "--start", "zygote", "--preload", "full", program)
    done = run_command([*without_pidfds, *run], tmp_path)
    assert done.returncode == 1, done
    assert "rank 1 failed with ZeroDivisionError" in done.stderr


@pytest.mark.ci
def test_ranks_of_any_kind_run_without_pidfds(tmp_path):
    program = str(write_program(tmp_path, "ends.py", "import os\nassert os.environ['RANK']\n"))
    for words in (["--nproc", "1", program], ["--nproc", "2", "--start", "exec", program], ["--no-python", "true"]):
        done = run_command([*without("ENOSYS", *PIDFDS), *ddplaunch_command("run", *words)], tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), words


def missing_call(call: str, error: int) -> str:
    """Return the message about a system call that a launcher needs and that fails."""
    return f"the system call {call} is needed to start ranks and fails: {os.strerror(error)}"


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("socketpair", 71, errno.ENOSYS),
        ("prctl", 71, errno.EPERM),
        ("sched_getaffinity", 0, errno.ENOSYS),
        ("prlimit64", 0, errno.EPERM),
    ],
)
def test_a_container_that_forbids_a_call(tmp_path, call, code, error):
    words = ddplaunch_command("run", "--nproc", "2", "--no-python", "true")
    done = run_command([*without(errno.errorcode[error], call), *words], tmp_path)
    assert done.returncode == code, done
    refusal = f"Error: {missing_call(call, error)}\n  allow it in the container's seccomp profile\n"
    assert done.stderr == (refusal if code else "")


@pytest.mark.slow
def test_a_container_that_forbids_prctl_to_a_program_and_the_doctor(tmp_path):
    """``launch()`` raises the reason, and a check of the doctor finds it."""
    program = write_program(tmp_path, "calls.py", "from ddplaunch import launch\nlaunch(print, nproc=2)\n")
    done = run_command([*without("EPERM", "prctl"), sys.executable, program], tmp_path)
    reason = missing_call("prctl", errno.EPERM)
    assert f"\nddplaunch.base.errors.LaunchError: {reason}\n" in done.stderr
    assert "OSError" not in done.stderr
    check = "from ddplaunch.features.doctor.checks.kernel import CHECK\nprint(CHECK.read(None)()['cannot_start'][0])\n"
    checked = run_command([*without("EPERM", "prctl"), sys.executable, "-c", check], tmp_path)
    assert checked.stdout == f"{reason}\n", checked.stderr


UNSHARE = shutil.which("unshare")


@pytest.mark.skipif(os.geteuid() != 0 or UNSHARE is None, reason="needs root and unshare")
@pytest.mark.parametrize(
    ("namespace", "made", "code", "message"),
    [
        ("-m", "umount -l /sys; umount -l /proc", 71, "Error: /proc is not mounted; "),
        ("-m", "mount -t tmpfs none /proc; mount -t tmpfs none /sys", 71, "Error: /proc is not mounted; "),
        ("-m", "mount -t tmpfs none /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9", 0, ""),
        ("-pf", "true", 71, "Error: /proc belongs to another PID namespace: this process is 1, but "),
    ],
    ids=["neither", "empty", "no /dev/fd", "another PID namespace"],
)
def test_file_systems_that_are_missing(tmp_path, namespace, made, code, message):
    words = shlex.join(ddplaunch_command("run", "--nproc", "2", "--no-python", "true"))
    done = run_command(["unshare", namespace, "--kill-child=KILL", "sh", "-c", f"{made}; exec {words}"], tmp_path)
    assert done.returncode == code, done
    assert done.stderr.startswith(message) if message else not done.stderr


def test_a_rank_that_is_traced_by_its_parent_has_its_signals(tmp_path):
    """PTRACE_TRACEME: a stop for a signal is not an end, and the signal arrives afterwards."""
    text = """
        import ctypes, os, signal, sys, time

        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(print("saved")))
        ctypes.CDLL(None).ptrace(0, 0, None, None)
        print("up", flush=True)
        if os.environ["RANK"] == "1":
            while not os.path.exists("up"):
                time.sleep(0.01)
            sys.exit(3)
        open("up", "w").close()
        time.sleep(600)
    """
    done = run_command(
        ddplaunch_command("run", "--nproc", "2", *FORKED, write_program(tmp_path, "t.py", text)), tmp_path
    )
    assert (done.returncode, done.stdout.count("saved")) == (3, 1), done


class ShellWithout(Shell):
    """Runs ``ddplaunch`` without pidfds."""

    def launch(self, *words: str | Path) -> str:
        return f"{shlex.join(without('ENOSYS', *PIDFDS))} {super().launch(*words)}"


@pytest.mark.ci
def test_warm_runs_without_pidfds(tmp_path):
    shell = ShellWithout(tmp_path)
    try:
        for killed in ("launcher", "zygote"):
            above, below = begin(shell)
            os.kill(above[killed], signal.SIGKILL)
            wait_for_exit(above["launcher"], above["zygote"], above["guardian"], *below)
            assert run_again(shell) == above["warm"]
        shell.log_out()
        wait_for_exit(above["warm"])
    finally:
        shell.close()
