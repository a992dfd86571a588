"""Tests of ``--check``: problems of a node that are found before an attempt, and how the job continues."""

import ctypes
import os
import signal
import subprocess
import time

import pytest

from ddplaunch.features.check import node
from tests.conftest import assert_refused, free_port, wait_until, write_program
from tests.constant_override import launcher_with_constant, write_launcher
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import FORKED, LIGHT

HOST = os.uname().nodename
NEWNS, PRIVATE = 0x20000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE with MS_REC: sched.h, mount.h


def with_small(*folders):
    """A ``preexec_fn`` that makes these folders small file systems, for the process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount():
        done = libc.unshare(NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None)
        for folder in folders:
            done = done or libc.mount(b"small", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), b"size=8m")
        if done:
            os._exit(99)

    return mount


@pytest.fixture
def small(tmp_path):
    """``with_small``, where this user may mount."""
    if os.geteuid() != 0 or subprocess.run(["true"], preexec_fn=with_small(tmp_path)).returncode:
        pytest.skip("needs root and the right to mount")
    return with_small


@pytest.fixture
def gpu(fake_nvml, tmp_path):
    """A machine with one GPU of whose memory 40 GiB are in use while a file exists: the file, and the environment."""
    held = tmp_path / "held"
    environ = fake_nvml.environ(1, busy=[(0, 1, 40 << 10)])
    return held, {**environ, "FAKE_NVML_BUSY_WHILE": str(held), "HELD": str(held)}


FAILS_ONCE = """
import os, pathlib, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path(os.environ["HELD"]).touch()
    sys.exit(3)
"""


@pytest.mark.ci
def test_memory_of_gpus_is_waited_for_before_a_restart(start_ddplaunch, tmp_path, gpu):
    held, environ = gpu
    write_program(tmp_path, "train.py", FAILS_ONCE)
    job = start_ddplaunch("run", "--check", "--max-restarts", "1", *FORKED, "train.py", env=environ)
    wait_until(lambda: "waiting for GPU 0: 40.0 GiB are still in use" in job.stderr(), "the wait")
    assert "attempt 1" not in job.stdout()
    held.unlink()
    assert job.wait() == 0
    assert job.stdout() == "attempt 0\nattempt 1\n"
    job.assert_nothing_left()


def test_no_restart_while_memory_of_gpus_stays_in_use(start_ddplaunch, tmp_path, gpu):
    """The failure is reported, and its exit code is the job's."""
    _, environ = gpu
    write_program(tmp_path, "train.py", FAILS_ONCE)
    words = ("--check", "--gpu-memory-timeout", "0", "--max-restarts", "1", *FORKED)
    job = start_ddplaunch("run", *words, "train.py", env=environ)
    assert job.wait() == 3
    assert job.stdout() == "attempt 0\n"
    expected = "no restart: GPU 0: 40.0 GiB of 79.6 GiB are in use after 0 s (--gpu-memory-timeout), by "
    assert expected in job.stderr()
    assert job.stderr().count("ddplaunch: rank 0 exited with code 3\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (signal.SIGINT, 130, ""),  # Ctrl-C ends the wait
        (signal.SIGSTOP, 2, "Error: the GPU driver did not answer in 2 s\n"),
        (signal.SIGKILL, 2, "Error: the check of this machine ended unexpectedly at the GPU driver\n"),
    ],
)
def test_a_check_that_hangs_or_is_killed_ends_the_job(start_ddplaunch, tmp_path, gpu, number, code, expected):
    held, environ = gpu
    assert node.STEP_TIMEOUT_S == 5
    sooner = launcher_with_constant(tmp_path, "features.check.node.STEP_TIMEOUT_S", 2.0)
    held.touch()
    write_program(tmp_path, "train.py", "print('started')")
    job = start_ddplaunch("run", "--check", "train.py", env=environ, executable=sooner)
    wait_until(lambda: "waiting for GPU 0" in job.stderr(), "the wait")
    (child,) = job.find("features.check.machine_check")
    os.kill(job.process.pid if number == signal.SIGINT else child, number)
    assert (job.wait(), job.stdout()) == (code, "")
    assert expected in job.stderr()
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interval_s", "expected"),
    [(0.5, ""), (60.0, "the check of this machine has not answered in 2.0 s: the ranks start without it")],
)
def test_a_check_that_goes_on_is_waited_for(start_ddplaunch, tmp_path, gpu, interval_s, expected):
    """Node 0 gives up on a node that says nothing, here after 2 s; a check that waits says that it goes on."""
    held, environ = gpu
    held.touch()
    body = """
        from ddplaunch.core.job import node_checks
        from ddplaunch.features.check import node

        node_checks.CHECK_TIMEOUT_S, node.CHECK_NOTICE_INTERVAL_S = 2.0, {}
        """
    write_program(tmp_path, "train.py", "print('started')")
    patched = write_launcher(tmp_path, body.format(interval_s))
    job = start_ddplaunch("run", "--check", "train.py", env=environ, executable=patched)
    if expected:
        wait_until(lambda: expected in job.stderr(), "the note")
    else:
        until = time.monotonic() + 4  # longer than node 0 waits for a word
        wait_until(lambda: time.monotonic() > until, "the wait")
        assert job.stdout() == ""
        held.unlink()
    assert (job.wait(), job.stdout()) == (0, "started\n")
    assert expected in job.stderr()


def test_without_the_option_gpus_are_not_checked(run_ddplaunch, tmp_path, gpu):
    held, environ = gpu
    held.touch()
    write_program(tmp_path, "train.py", "print('started')")
    done = run_ddplaunch("run", "train.py", env=environ)
    assert (done.returncode, done.stdout) == (0, "started\n")


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("/dev/shm", "8 MiB free in /dev/shm (64 MiB needed)"),
        ("logs", "8 MiB free in --log-dir (logs/run) (50 MiB needed)"),
        ("tmp", "8 MiB free in TMPDIR ({tmp}) (50 MiB needed)"),
    ],
)
def test_too_little_free_space_ends_the_job(start_ddplaunch, tmp_path, small, which, expected):
    write_program(tmp_path, "train.py", "print('started')")
    folders = {name: tmp_path / name for name in ("logs", "tmp")}
    for folder in folders.values():
        folder.mkdir()
    words = ("--check", "--log-dir", "logs", "--run-id", "run", "train.py")
    folder = folders.get(which, which)
    environ = {"TMPDIR": str(folders["tmp"])}
    job = start_ddplaunch("run", *words, env=environ, preexec_fn=small(folder))
    assert (job.wait(), job.stdout()) == (2, "")
    assert job.stderr().splitlines()[0] == "Error: " + expected.format(**folders)


@pytest.mark.ci
@pytest.mark.parametrize(("nnodes", "bad"), [("2", 1), ("1:2", 0), ("1:2", 1)])
def test_a_node_that_lacks_something(start_ddplaunch, tmp_path, small, nnodes, bad):
    """The job ends before a rank starts, unless it is elastic and may go on without this node."""
    write_program(tmp_path, "train.py", "import os; print('of', os.environ['WORLD_SIZE'])")
    port = str(free_port())
    words = ("run", "--check", "--nnodes", nnodes, "--master-addr", "127.0.0.1", "--master-port", port, *FORKED)
    own = {"preexec_fn": small("/dev/shm")}
    jobs = [
        start_ddplaunch(*words, "--node-rank", str(rank), "train.py", **(own if rank == bad else {})) for rank in (0, 1)
    ]
    codes = [job.wait() for job in jobs]
    lack = "8 MiB free in /dev/shm (64 MiB needed)"
    if nnodes == "2" or bad == 0:
        assert codes == [2, 2]
        assert [job.stdout() for job in jobs] == ["", ""]
        assert all(f"Error: node {bad} ({HOST}): {lack}\n" in job.stderr() for job in jobs)
        return
    assert codes == [0, 2]
    assert jobs[0].stdout() == "of 1\n"
    assert f"ddplaunch: node 1 ({HOST}) is left out: {lack}\n" in jobs[0].stderr()
    assert f"Error: node 1 ({HOST}) is left out: {lack}\n" in jobs[1].stderr()


def test_the_gpu_memory_timeout_needs_the_check(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--gpu-memory-timeout", "60", "train.py")
    assert_refused(done, "Error: --gpu-memory-timeout 60 works only with --check\n  add --check\n")


@pytest.mark.parametrize(
    ("name", "error", "code", "output", "message"),
    [
        ("check.HelperProcess", BlockingIOError(11, "Resource temporarily unavailable"), 2, "",
         "Error: the check of this machine cannot start: Resource temporarily unavailable\n"),
        ("check.MachineCheck._on_output", RuntimeError("broken"), 0, "started\n",
         "bug in ddplaunch: the check of this machine failed and is left out"),
        ("check.CheckSide.__init__", RuntimeError("broken"), 0, "started\n",
         "bug in ddplaunch: the feature check failed and is left out"),
        ("check.CheckSide.on_message", RuntimeError("broken"), 0, "started\n",
         "bug in ddplaunch: the feature check failed and is left out"),
        ("check.CheckSide.on_check", RuntimeError("broken"), 0, "started\n",
         "bug in ddplaunch: the feature check failed and is left out"),
        ("JobMachine._on_check_reply", RuntimeError("broken"), 70, "", "bug in ddplaunch: RuntimeError: broken"),
    ],
    ids=["cannot start", "bug on a node", "no side", "bug before", "bug of the side", "bug in the job"],
)  # fmt: skip
def test_an_error_in_the_check(start_ddplaunch, tmp_path, name, error, code, output, message):
    """A check that cannot start ends the job, a bug in it is left out; the job waits for no reply after either."""
    broken = write_launcher(
        tmp_path,
        f"""
        import ddplaunch.features.check.node as check
        from ddplaunch.core.job.machine import JobMachine

        def fail(*arguments, **more):
            raise {error!r}

        {name} = fail
        """,
    )
    write_program(tmp_path, "train.py", "print('started')")
    job = start_ddplaunch("run", "--check", *LIGHT, "train.py", executable=broken)
    assert (job.wait(), job.stdout()) == (code, output)
    assert job.stderr().count(message) == 1
