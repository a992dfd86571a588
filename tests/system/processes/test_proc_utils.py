"""Tests of what is read from /proc about other processes."""

import subprocess
import sys

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
