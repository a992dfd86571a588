"""Replays of the rank's end of the rank channel in this process, with the launcher's end played by the test."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from ddplaunch.core.rank.rank_runner import load_private_module
from tests.scaled_timeouts import scaled_timeout

rank_side = load_private_module("core/rank/inspection_endpoint")


@pytest.fixture
def world(monkeypatch):
    """An endpoint, the launcher's end, and the requests that were handled."""
    ours, theirs = socket.socketpair()
    ours.settimeout(scaled_timeout(30))
    hooks, handled = [], []
    monkeypatch.setattr(os, "register_at_fork", lambda *, before: hooks.append(before))
    endpoint = rank_side.InspectionEndpoint(fd := theirs.detach(), __import__)
    endpoint.set_handler(b"sq", lambda line, frame: handled.append((line, frame)))
    lines = ours.makefile("rb")
    yield SimpleNamespace(endpoint=endpoint, socket=ours, lines=lines, hooks=hooks, handled=handled, fd=fd)
    endpoint.stop()
    os.close(endpoint._fd)
    lines.close()
    ours.close()


def test_the_descriptor_is_out_of_the_programs_way(world):
    high = world.endpoint._fd
    assert high > world.fd
    assert fcntl.fcntl(high, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(world.fd)


def test_what_the_rank_reports(world, monkeypatch):
    world.endpoint.report_signal("wake", 36)
    world.endpoint.report_signal("profile", 37, is_used=False)
    world.endpoint.report_failure("ValueError: ü\nand more")
    for name in ("pid", "_inode"):  # as in a process that the program has forked, or once it has closed the channel
        with monkeypatch.context() as patch:
            patch.setattr(world.endpoint, name, 1)
            world.endpoint.report_failure("not of the rank")
    world.endpoint.report_failure("E")
    lines = [b"g wake 36\n", b"o profile 37\n", b"f ValueError: \\xfc and more\n", b"f E\n"]
    assert [world.lines.readline() for _ in lines] == lines


def test_a_request_waits_while_an_import_takes_its_lock(world):
    namespace = {}
    exec(compile("def acquire(call): return call()", "<frozen importlib._bootstrap>", "exec"), namespace)
    world.socket.send(b"s\n")
    namespace["acquire"](lambda: world.endpoint.wake(sys._getframe()))
    assert world.handled == []
    world.endpoint.wake(sys._getframe())
    assert [line for line, _ in world.handled] == [b"s"]


def test_requests_before_the_thread_are_handled_when_a_signal_wakes_the_main_thread(world):
    endpoint, woken, frame = world.endpoint, [], sys._getframe()
    endpoint.on_wake.append(woken.append)
    endpoint.wake(frame)
    assert (world.handled, woken) == ([], [frame])
    world.socket.sendall(b"s1\nx2\nq3\n")
    endpoint.wake(frame)
    assert world.handled == [(b"s1", frame), (b"q3", frame)]
    endpoint.pid += 1
    endpoint.wake(frame)
    assert woken == [frame] * 2, "in a process that the program has forked"


def test_the_thread_reads_requests_until_a_fork(world):
    endpoint, done, is_needed, masks = world.endpoint, threading.Event(), [True], []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    endpoint.set_handler(b"e", lambda line, frame: done.set())
    endpoint.before_request = lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    endpoint.stop()  # without a thread
    endpoint.start_thread(lambda: is_needed[0])
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, []), world.lines.readline()) == (before, b"t\n")
    world.socket.sendall(b"s1\nq")
    world.socket.sendall(b"2\ne\n")
    assert done.wait(scaled_timeout(30))
    assert world.handled == [(b"s1", None), (b"q2", None)]
    assert (len(masks), signal.SIGUSR1 in masks[0]) == (3, True)
    (at_fork,) = world.hooks
    at_fork()
    endpoint.wake(None)
    is_needed[0] = False
    at_fork()
    assert world.lines.readline() == b"l\n"
    at_fork()
    endpoint.report_signal("wake", 36)
    assert world.lines.readline() == b"g wake 36\n", "it has ended once"
