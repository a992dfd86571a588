"""Tests of the socket that keeps a crashed rank from ending until it has been inspected."""

import ctypes
import faulthandler
import os
import signal

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.crash_socket import CrashSocket


def start(behave):
    """Run a function in a child that has the rank's end; return the loop, the socket, and what happens."""
    loop, seen = EventLoop(), []
    crash_socket = CrashSocket(loop, lambda: seen.append("crash"), seen.append)
    pid = os.fork()
    if pid == 0:
        crash_socket._socket.close()
        faulthandler.enable(crash_socket.rank_fd)
        behave()
        os._exit(0)
    os.close(crash_socket.rank_fd)
    return loop, crash_socket, seen, pid


@pytest.mark.parametrize(
    ("crash", "number"),
    [
        (lambda: ctypes.CDLL(None).abort(), signal.SIGABRT),
        (lambda: ctypes.PyDLL(None).abort(), signal.SIGABRT),  # it holds the GIL
        (lambda: ctypes.PyDLL(None).memset(0, 1, 1), signal.SIGSEGV),
    ],
)
def test_a_crashed_process_waits_until_it_is_released(crash, number):
    loop, crash_socket, seen, pid = start(crash)
    while not seen:
        loop.run_once()
    assert seen == ["crash"]
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    crash_socket.release()
    assert os.waitstatus_to_exitcode(wait_for(loop, pid)) == -number
    crash_socket.read_pending()
    printed = b"".join(seen[1:]).decode()
    assert printed.startswith("Fatal Python error: ")
    assert __file__ in printed
    crash_socket.release()  # once more, after the end: nothing happens


def wait_for(loop, pid):
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        loop.call_later(0.01, lambda: None)
        loop.run_once()
    return ended[1]


def test_a_process_that_ends_well_does_nothing():
    loop, crash_socket, seen, pid = start(lambda: None)
    loop.run_once()
    os.waitpid(pid, 0)
    crash_socket.close()
    assert seen == []


def test_a_process_whose_launcher_is_gone_ends():
    loop, crash_socket, seen, pid = start(lambda: ctypes.CDLL(None).abort())
    while not seen:
        loop.run_once()
    crash_socket.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGABRT
