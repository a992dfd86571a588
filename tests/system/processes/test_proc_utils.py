"""Tests of what is read from /proc about other processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.system.processes import proc_utils
from ddplaunch.system.processes.child_processes import ChildProcess
from tests.conftest import wait_until

MAIN_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_without_a_command_line_still_runs():
    """The kernel shows no command line once the main thread has ended; the other threads still run."""
    process = subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS])
    try:
        wait_until(lambda: not proc_utils.read_proc_file(process.pid, "cmdline"), "the end of the main thread")
        assert not proc_utils.is_multiprocessing_helper(process.pid)
    finally:
        process.kill()
        process.wait()
    assert proc_utils.is_multiprocessing_helper(process.pid)


def test_a_child_that_cannot_be_killed_is_not_waited_for(monkeypatch):
    """SIGKILL does not end a process that is in uninterruptible sleep."""
    process = subprocess.Popen(["sleep", "600"])
    child = ChildProcess(process.pid)
    monkeypatch.setattr(child, "kill", lambda: None)
    monkeypatch.setattr(proc_utils, "KILL_TIMEOUT_S", 0.01)
    try:
        assert child.wait(0.01) is None
    finally:
        process.kill()
        child.on_reaped(process.wait())


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_the_end_of_a_process_is_waited_for(monkeypatch, sleeper, has_pidfds):
    if not has_pidfds:
        monkeypatch.setattr(proc_utils, "open_pidfd", lambda pid: None)
    assert not proc_utils.wait_for_end(sleeper.pid, 0.02)
    sleeper.kill()
    assert proc_utils.wait_for_end(sleeper.pid, None)
    assert proc_utils.wait_for_end(sleeper.pid, 0.0), "it is a zombie"
    sleeper.wait()
    assert (proc_utils.start_ticks(sleeper.pid), proc_utils.describe_process(sleeper.pid)) == (-1, f"pid {sleeper.pid}")
    assert not proc_utils.catches_signal(sleeper.pid, signal.SIGCHLD)


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (None, []),
        (ProcessLookupError(), []),
        (PermissionError(), [(7, signal.SIGTERM)]),  # a container runtime that does not know the call
        (AttributeError(), [(7, signal.SIGTERM)]),
    ],
)
def test_a_signal_is_sent_by_pid_where_there_are_no_pidfds(monkeypatch, error, sent):
    calls = []

    def pidfd_send_signal(pidfd, number):
        assert (pidfd, number) == (3, signal.SIGTERM)
        if error:
            raise error

    def kill(pid, number):
        calls.append((pid, number))
        raise ProcessLookupError

    monkeypatch.setattr(proc_utils.signal, "pidfd_send_signal", pidfd_send_signal, raising=False)
    monkeypatch.setattr(proc_utils.os, "kill", kill)
    proc_utils.send_signal(7, signal.SIGTERM, 3)
    assert calls == sent
    proc_utils.send_signal(8, signal.SIGTERM)
    assert calls == [*sent, (8, signal.SIGTERM)]


TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGUSR1, print)
left = subprocess.Popen(["sh", "-c", "echo $$; sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
zombie = subprocess.Popen(["true"])
os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
print(*left.stdout.readline().split(), *left.stdout.readline().split(), zombie.pid, flush=True)
time.sleep(600)
"""


def test_the_descendants_of_a_process():
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as process:
        shell, below, zombie = map(int, process.stdout.readline().split())
        try:
            assert proc_utils.list_descendants(process.pid) == [shell, below]
            assert proc_utils.list_descendants(process.pid, is_excluded=lambda pid: pid == shell) == []
            assert proc_utils.list_descendants(process.pid, is_excluded=lambda pid: pid == below) == [shell, below]
            assert proc_utils.list_children(process.pid) == [shell, zombie]
            assert process.pid in proc_utils.list_children()
            assert (proc_utils.start_ticks(zombie), proc_utils.read_state(zombie)) == (-1, ("Z", process.pid))
            caught = [proc_utils.catches_signal(process.pid, number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
            assert caught == [True, False]
            name = f"sleep (pid {below})"  # "sh" until the shell's fork has started sleep
            wait_until(lambda: proc_utils.describe_process(below) == name, name)
            os.kill(below, signal.SIGSTOP)
            wait_until(lambda: proc_utils.is_suspended(below), "its stop")
            assert not proc_utils.is_suspended(shell)
        finally:
            for pid in (below, shell):
                os.kill(pid, signal.SIGKILL)
            process.kill()


def test_a_process_in_uninterruptible_sleep_is_described_with_what_it_waits_in(monkeypatch):
    files = {"comm": b"python3\n", "stat": b"7 (a) b) D 1 " + b"0 " * 15 + b"1 0 42 0", "wchan": b"nfs_wait"}
    monkeypatch.setattr(proc_utils, "read_proc_file", lambda pid, name: files[name])
    assert proc_utils.describe_process(7) == "python3 (pid 7, in uninterruptible sleep in nfs_wait)"
    files["wchan"] = b"0"
    assert proc_utils.describe_process(7) == "python3 (pid 7, in uninterruptible sleep in the kernel)"


HAS_SHARED_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1).name, flush=True)
time.sleep(600)
"""

KILLS_ITS_DESCENDANTS = f"""
import subprocess, sys
from ddplaunch.system.processes import proc_utils
proc_utils.adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", {HAS_SHARED_MEMORY!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="")
print(proc_utils.kill_descendants(proc_utils.os.getpid())[0])
"""


STUCK_CLEANER = """
import subprocess, sys, time
from ddplaunch.system.processes import proc_utils
proc_utils.CLEANER_TIMEOUT_S = 0.2
word = "from multiprocessing.resource_tracker import main"
cleaner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", word])
began = time.monotonic()
print(proc_utils.kill_descendants(proc_utils.os.getpid())[0], time.monotonic() - began > 0.2)
"""


def test_what_does_not_end_although_it_removes_shared_memory_is_killed():
    done = subprocess.run([sys.executable, "-c", STUCK_CLEANER], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"


def test_shared_memory_of_killed_processes_is_removed():
    """The resource tracker of multiprocessing does that, if it is not killed with them."""
    done = subprocess.run([sys.executable, "-c", KILLS_ITS_DESCENDANTS], capture_output=True, text=True, check=True)
    name, left = done.stdout.splitlines()
    assert left == "[]"
    assert not Path("/dev/shm", name).exists()
