"""Tests of a stopped zygote (SIGSTOP, a debugger): it keeps no resources of a launcher."""

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from ddplaunch.core.rank import zygote_channel
from ddplaunch.features.warm import warm_client
from tests.features.warm.conftest import BUSY, Shell, wait_for_exit, wait_for_text
from tests.features.warm.test_kills import import_slowly
from tests.scaled_timeouts import scaled_timeout


@pytest.mark.ci
def test_a_pipe_does_not_wait_for_a_stopped_zygote(shell: Shell):
    made = shell.run().made
    os.kill(made, signal.SIGSTOP)
    shell.set_reply_timeout(0.2)
    try:
        line = f"{shell.launch('--log-dir', 'log', 'shows.py')} | timeout {scaled_timeout(30):.0f} cat"
        done = shell.run(line)
        assert done.code == 0, "the pipe stayed open"
        assert done.stdout.count("made") == 2
        assert done.made != made
        assert shell.reasons("log") == [BUSY]
    finally:
        os.kill(made, signal.SIGCONT)
    shell.set_reply_timeout(scaled_timeout(5))
    assert shell.run().made == made, "it serves the next run"


@pytest.mark.slow
def test_a_zygote_stopped_while_it_imports_ends_with_its_launcher(shell: Shell):
    import_slowly(shell)
    reader, out = shell.begin(f"{{ sh -c '{shell.launch('shows.py')} & echo launcher $!; wait' | cat; }}")
    launcher = int(wait_for_text(out, "launcher ").split()[1])
    warm = int(wait_for_text(shell.folder / "importing", "\n"))
    os.kill(warm, signal.SIGSTOP)
    os.kill(launcher, signal.SIGKILL)
    wait_for_exit(launcher, warm, reader)


def _takes(control: socket.socket) -> None:
    zygote_channel.receive_message(control)


@pytest.mark.parametrize("does", [lambda control: None, _takes], ids=["given", "taken"])
def test_descriptors_sent_to_a_stopped_zygote_are_closed(does: Callable[[socket.socket], None]):
    """No process keeps the launcher's descriptors if a zygote is stopped before or after it receives them."""
    (ours, theirs), (line, its) = socket.socketpair(), socket.socketpair()
    reading, writing = os.pipe()
    zygote = os.fork()
    if zygote == 0:
        os.close(writing)
        zygote_channel.send_message(theirs, {"op": "zygote_offer", "pid": os.getpid()}, [os.pidfd_open(os.getpid())])
        does(theirs)
        while True:
            os.kill(os.getpid(), signal.SIGSTOP)
    with ours, theirs, line, its, theirs.dup():  # a warm zygote that is stopped too has one
        before = os.listdir("/proc/self/fd")
        began = time.monotonic()
        assert not warm_client.hand_over_fds(ours, theirs, line, [writing])
        assert time.monotonic() - began < scaled_timeout(5)
        assert os.listdir("/proc/self/fd") == before
        assert os.waitpid(zygote, 0)[1] == signal.SIGKILL
        os.close(writing)
        assert os.read(reading, 1) == b""
    os.close(reading)


def test_no_descriptor_is_sent_to_a_zygote_that_does_not_reply(monkeypatch):
    (ours, theirs), (line, its) = socket.socketpair(), socket.socketpair()
    with ours, theirs, line, its:
        assert not warm_client.hand_over_fds(ours, theirs, line, [0, 1, 2])
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        its.close()
        monkeypatch.setattr(warm_client, "REPLY_TIMEOUT_S", 60.0)
        began = time.monotonic()
        assert not warm_client.hand_over_fds(ours, theirs, line, [0, 1, 2])
        assert time.monotonic() - began < warm_client.REPLY_TIMEOUT_S, "a closed connection is no timeout"
