"""Tests of the sink on pipes and a full disk, with the test's own timers: what is buffered, dropped and counted."""

from __future__ import annotations

import errno
import fcntl
import os
import socket

import pytest

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core.node_config import ScreenOptions
from ddplaunch.core.output.screen import Screen
from ddplaunch.core.output.sink import HIGH_WATER_BYTES, READER_TIMEOUT_S, RETRY_S, Sink


class Loop(EventLoop):
    """A loop whose timers are called by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[Timer] = []

    def call_later(self, seconds, callback):
        self.timers.append(Timer(callback, seconds))
        return self.timers[-1]

    def run_once(self):
        self.call_soon(lambda: None)  # so that it does not wait
        super().run_once()

    def due(self) -> list[float]:
        """The seconds of the timers that are set, the earliest first."""
        return sorted(each.when for each in self.timers if each.callback)

    def let_expire(self, seconds):
        (timer,) = (each for each in self.timers if each.callback and each.when == seconds)
        callback, timer.callback = timer.callback, None
        callback()


@pytest.fixture
def pipe():
    """A pipe of 4 KiB."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            pass


LINES = b"".join(b"%-15d\n" % number for number in range(1024))  # 16 KiB


def test_a_slow_reader_gets_everything_in_order(pipe):
    loop, drained = Loop(), []
    sink = Sink(loop, pipe[1])
    sink.on_drained = lambda: drained.append(sink.is_drained)
    sink.write(LINES)
    sink.write(LINES)
    seen = b""
    while not sink.is_drained and len(seen) < len(LINES) * 2:
        assert loop.due() == [READER_TIMEOUT_S]
        former = loop.timers[-1]
        seen += os.read(pipe[0], 4096)
        loop.run_once()
        assert former.callback is None, "the time begins anew with each byte"
    assert seen + os.read(pipe[0], 4096) == LINES * 2
    assert (drained, loop.due()) == ([False] * (len(drained) - 1) + [True], [])
    sink.write(b"more\n")
    assert (os.read(pipe[0], 4096), loop.due()) == (b"more\n", [])


def test_a_reader_that_comes_back_reads_how_much_is_missing(pipe):
    loop, drained = Loop(), []
    sink = Sink(loop, pipe[1])
    sink.on_drained = lambda: drained.append(1)
    sink.write(LINES[8:])  # the pipe ends within a line
    assert not sink.is_full
    sink.write(b"x" * HIGH_WATER_BYTES + b"\n")
    assert (sink.is_full, sink.is_drained) == (True, False)
    loop.let_expire(READER_TIMEOUT_S)
    assert (sink.is_full, sink.is_drained, len(drained)) == (False, True, 1)
    sink.write(b"one\ntwo\n")
    seen = os.read(pipe[0], 4096)
    for _ in ("the rest of the line", "the note"):
        loop.run_once()
        seen += os.read(pipe[0], 4096)
    assert sink.is_drained
    sink.write(b"after\n")
    seen += os.read(pipe[0], 4096)
    before, note, after = seen.partition(b"[ddplaunch] 770 lines are missing here: not read for 10 s\n")
    assert (before, bool(note), after) == (LINES[8 : 8 + 4104], True, b"after\n")
    assert sink.lost_line_count == 0, "of files only"


def test_a_screen_is_full_while_its_sink_is(pipe):
    loop, drained = Loop(), []
    screen = Screen(loop, ScreenOptions("", READER_TIMEOUT_S, 0.0, colour=False))
    screen._stdout = Sink(loop, pipe[1])
    screen.set_drain_callback(lambda: drained.append(screen.is_full))
    screen.show_lines(0, 1, b"x\n" * HIGH_WATER_BYTES)
    assert screen.is_full
    loop.let_expire(READER_TIMEOUT_S)
    assert drained == [False]


def test_a_reader_that_is_gone_is_not_waited_for(pipe):
    loop = Loop()
    sink = Sink(loop, pipe[1])
    sink.write(LINES)
    os.close(pipe[0])
    loop.run_once()
    assert (sink.is_closed, sink.is_drained, sink.is_full, loop.due()) == (True, True, False, [])
    sink.write(LINES)
    assert loop.due() == []


def test_a_stuck_reader_that_closes_is_not_watched_any_more(pipe):
    loop = Loop()
    sink = Sink(loop, pipe[1])
    sink.write(LINES)
    loop.let_expire(READER_TIMEOUT_S)
    assert sink.stuck
    os.close(pipe[0])
    loop.run_once()
    assert (sink.is_closed, sink.is_drained, loop.due()) == (True, True, [])
    assert not loop._selector.get_map(), "it is always writable now"


def test_a_socket_does_not_block_the_launcher():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink = Sink(Loop(), ours.fileno())
        sink.write(LINES * 1024)
        assert not sink.is_drained


def test_a_file_has_everything_once_the_disk_has_room(tmp_path, monkeypatch):
    loop, write, room = Loop(), os.write, iter([100])

    def write_some(fd, data):
        if count := next(room, 0):
            return write(fd, data[:count])
        raise OSError(errno.ENOSPC, "No space left on device")

    with open(tmp_path / "log", "wb") as file:
        sink = Sink(loop, file.fileno())
        monkeypatch.setattr(os, "write", write_some)
        sink.write(LINES)
        sink.write(LINES)
        monkeypatch.undo()
        loop.let_expire(RETRY_S)
    assert (sink.is_drained, sink.lost_line_count, loop.due()) == (True, 0, [])
    assert (tmp_path / "log").read_bytes() == LINES * 2


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_is_waited_for_while_the_job_runs_and_there_is_room(is_full):
    loop = Loop()
    with open("/dev/full", "wb") as full:
        sink = Sink(loop, full.fileno())
        sink.write(LINES)
        assert loop.due() == [RETRY_S, READER_TIMEOUT_S]
        loop.let_expire(RETRY_S)
        loop.let_expire(READER_TIMEOUT_S)
        assert (sink.stuck, loop.due()) == (False, [RETRY_S, READER_TIMEOUT_S])
        if is_full:
            sink.write(b"x" * HIGH_WATER_BYTES)
        else:
            sink.end()
        assert loop.due() == [RETRY_S, READER_TIMEOUT_S]
        loop.let_expire(READER_TIMEOUT_S)
        assert (sink.is_drained, sink.lost_line_count, sink.error) == (True, 1024, "No space left on device")
