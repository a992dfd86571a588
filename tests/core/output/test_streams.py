"""Tests of the output pipes without processes, on a recording screen: what is shown when, and what stays in memory."""

from __future__ import annotations

import gc
import os
import resource
from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.output.streams import MEMORY_TAIL_BYTES, REPORTED, Streams, TailBuffer
from ddplaunch.core.output.traceback_filter import EXIT_TIMEOUT_S

TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n'
SECONDARY = b"RuntimeError: [/src/gloo/pair.cc:538] Connection closed by peer\n"


class RecordingScreen:
    """The screen and the listener of streams, in one."""

    def __init__(self):
        self.is_full, self.drained = False, 0
        self.shown, self.notes, self.held, self.printed = [], [], [], []
        self.set_drain_callback = lambda callback: setattr(self, "resume", callback)
        self.write_marker = self.shown.append
        self.show_note = self.notes.append
        self.hold_traceback = lambda source, text: self.held.append((source, text))
        self.on_output = self.printed.append

    def show_lines(self, source, number, lines, bar=b"", *, last=False):
        if lines or bar:
            self.shown.append((source, number, lines, bar) if bar else (source, number, lines))

    def on_output_drained(self):
        self.drained += 1

    def take(self):
        shown, self.shown = self.shown, []
        return shown


@pytest.fixture(autouse=True, scope="module")
def _objects_of_other_tests():
    """Exempt them from garbage collection, which takes seconds with all of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def world(monkeypatch):
    """The streams of one node, a clock, and a loop whose timers the test calls; at the end all files are closed."""
    loop, screen, timers, clock, opened = EventLoop(), RecordingScreen(), [], SimpleNamespace(now=1000.0), []
    gc.collect()  # closes the loops of other tests
    before = os.listdir("/proc/self/fd")
    streams = Streams(loop, screen, screen, full_tracebacks=False)
    monkeypatch.setattr(loop, "call_later", lambda seconds, callback: timers.append((seconds, callback)))
    times = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now)
    monkeypatch.setattr("ddplaunch.core.output.streams.time", times)

    def start(rank=0, show=(1, 2), log=None):
        """Open the streams of a rank; return its stdout and stderr."""
        fds = {}
        streams.open_rank(fds, rank, has_stdin=False, show=frozenset(show), log=log)
        assert os.read(fds["stdin"], 1) == b""
        opened.extend(fds.values())
        return fds["stdout"], fds["stderr"]

    def end(fd):
        opened.remove(fd)
        os.close(fd)

    def run():
        """Handle what is ready; return what is shown then."""
        loop.call_soon(lambda: None)  # so that the loop does not wait
        loop.run_once()
        return screen.take()

    def write(fd, data):
        os.write(fd, data)
        return run()

    shared = {"screen": screen, "timers": timers, "streams": streams, "clock": clock, "opened": opened}
    yield SimpleNamespace(**shared, start=start, end=end, run=run, write=write)
    for source in ("viewer", "tensorboard"):
        streams.close_source(source)
    streams.close()
    assert len(os.listdir("/proc/self/fd")) == len(before) + len(opened)
    for fd in opened:
        os.close(fd)


def test_the_traceback_of_a_rank_that_goes_on_is_shown_after_a_timeout(world):
    out, err = world.start()
    assert world.write(err, b"before\n" + TRACEBACK) == [(0, 2, b"before\n")]
    assert world.write(err, SECONDARY) == []
    assert world.write(out, b"\r 5%") == [(0, 1, b"", b" 5%")]
    ((seconds, show),) = world.timers
    assert seconds == EXIT_TIMEOUT_S
    show()
    assert world.screen.take() == [(0, 2, TRACEBACK + SECONDARY)]
    assert world.write(err, TRACEBACK + SECONDARY) == []
    assert len(world.timers) == 2, "the next one has a timeout of its own"
    assert world.write(err, b"handled\n") == [(0, 2, TRACEBACK + SECONDARY + b"handled\n")]
    at_once = b"before\n" + TRACEBACK + SECONDARY + b"handled\n"
    assert world.write(err, at_once) == [(0, 2, at_once)]
    assert world.write(out, b"\n" + TRACEBACK + SECONDARY) == [(0, 1, b" 5%\n" + TRACEBACK + SECONDARY)], "of stdout"


def test_a_long_traceback_is_shown_at_once(world):
    _, err = world.start()
    long = TRACEBACK + b'  File "deep.py", line 1, in f\n' * 4000
    assert world.write(err, long) == []
    assert world.write(err, long[:-1]) == []
    assert world.write(err, b"\n" + long) == [(0, 2, long * 3)]


@pytest.mark.parametrize(
    ("text", "lines", "held"),
    [
        (
            TRACEBACK + SECONDARY,
            "RuntimeError: … Connection closed by peer (traceback left out; to see it: --show all)\n".encode(),
            [],
        ),
        (TRACEBACK + b"ValueError: x\n", None, [(0, TRACEBACK + b"ValueError: x\n")]),
        (b"no newline", b"no newline\n", []),
    ],
)
def test_the_end_of_a_stream(world, text, lines, held):
    out, err = world.start()
    world.start(1)
    world.write(err, text)
    world.end(err)
    assert world.run() == ([(0, 2, lines)] if lines else [])
    assert world.screen.held == held
    world.end(out)
    world.run()
    assert (world.streams.has_open_rank, world.screen.drained) == (True, 0), "another rank still prints"


def test_the_last_output_of_ranks_ends_the_attempt(world):
    fds = {}
    world.streams.open_program(fds, "tensorboard", show=False, log=None, on_output=lambda: None)
    world.opened.extend(fds.values())
    for fd in world.start():
        assert world.screen.drained == 0
        world.end(fd)
        world.run()
    assert (world.streams.has_open_rank, world.screen.drained) == (False, 1)


def test_a_full_screen_pauses_all_ranks(world):
    ranks = [world.start(rank) for rank in (0, 1)]
    world.screen.is_full = True
    assert world.write(ranks[0][0], b"a\n") == [(0, 1, b"a\n")]
    assert world.write(ranks[1][0], b"b\n") == []
    world.screen.resume()
    assert world.run() == [], "it is still full"
    world.screen.is_full = False
    world.screen.resume()
    assert world.run() == [(1, 1, b"b\n")]


def test_what_is_hidden_stays_in_memory_and_is_logged(world, tmp_path):
    log = tmp_path / "rank-0.log"
    pieces, former = [], []
    for seen in (pieces, former):
        world.streams.subscribe(lambda rank, data, seen=seen: seen.append((rank, data)))
    world.streams.unsubscribe(world.streams._subscribers[1])
    out, err = world.start(show=(2,), log=str(log))
    assert world.write(out, b"one\n") == []
    assert world.write(err, b"two\n") == [(0, 2, b"two\n")]
    assert log.read_bytes() == b"one\ntwo\n"
    assert (world.streams.tail(0), world.streams.tail(0, 5)) == (b"one\ntwo\n", b"\ntwo\n")
    assert (world.streams.tail(1), world.streams.since(1, 0), world.streams.times(1, 8)) == (b"", b"", b"")
    assert world.write(err, b"unfinished") == []
    world.streams.close()
    assert world.screen.take() == [(0, 2, b"unfinished\n")]
    world.clock.now = 2000.0
    out, _ = world.start(log=str(log))
    world.write(out, b"three\n")
    assert log.read_bytes() == b"one\ntwo\nunfinishedthree\n"
    assert log.with_suffix(".times").read_bytes() == b"0 1000.000\n0 2000.000\n"
    assert world.streams.tail(0) == b"three\n", "of this attempt"
    since = [world.streams.since(0, moment) for moment in (1000, 1001, 1500, 2500)]
    assert since == [b"one\ntwo\nunfinishedthree\n", b"three\n", b"three\n", b""]
    assert world.streams.times(0, 10) == b"0 1000.000\n4 2000.000\n"
    assert world.streams.ranks_in_memory() == [0]
    assert (pieces[:2], former, world.screen.printed) == ([(0, b"one\n"), (0, b"two\n")], [], [0] * 4)


@pytest.mark.parametrize("has_log", [True, False])
def test_how_much_stays_in_memory(world, tmp_path, has_log):
    out, _ = world.start(show=(), log=str(tmp_path / "rank-0.log") if has_log else None)
    for _ in range(10):
        world.write(out, b"x" * 60_000)
    assert len(world.streams.tail(0)) == (REPORTED if has_log else MEMORY_TAIL_BYTES)


def test_a_log_that_cannot_be_written(world, tmp_path):
    out, _ = world.start(log=str(tmp_path / "missing" / "rank-0.log"))
    (tmp_path / "rank-1.times").mkdir()
    world.start(1, log=str(tmp_path / "rank-1.log"))
    assert world.screen.notes == [
        "rank 0 has no log file: No such file or directory",
        "`logs --since` will not work for rank 1: Is a directory",
    ]
    assert world.write(out, b"shown\n") == [(0, 1, b"shown\n")]


def test_a_log_on_a_full_disk_ends(world, tmp_path):
    out, _ = world.start(log=str(tmp_path / "rank-0.log"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        shown = []
        for number in range(4):
            world.clock.now += 2
            shown.append(world.write(out, b"\xff\x00 %d\n" % number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert shown == [[(0, 1, b"\xff\x00 %d\n" % number)] for number in range(4)]
    assert world.screen.notes == [
        "the log of rank 0 ends here: File too large",
        "`logs --since` will not work for rank 0: File too large",
    ]
    assert (tmp_path / "rank-0.log").read_bytes() == b"\xff\x00 0\n"


def test_a_mark_comes_after_all_output_so_far(world):
    out, err = world.start()
    hidden, _ = world.start(1, show=())
    os.write(hidden, b"hidden")
    os.write(out, b"unfinished")
    os.write(err, TRACEBACK + SECONDARY)
    world.streams.flush(b"mark\n")
    assert world.screen.take() == [(0, 1, b"unfinished\n"), (0, 2, TRACEBACK + SECONDARY), b"mark\n"]


def test_a_program_is_shown_on_request_and_read_to_its_end(world, tmp_path):
    fds, called, log = {}, [], tmp_path / "viewer.log"
    world.streams.open_program(fds, "viewer", show=False, log=str(log), on_output=lambda: called.append(1))
    world.opened.extend(fds.values())
    assert world.write(fds["stdout"], b"hidden\n") == []
    world.streams.set_shown("viewer", True)
    assert world.write(fds["stderr"], b"shown\n\r 5%") == [("viewer", 2, b"shown\n", b" 5%")]
    world.streams.set_shown("viewer", False)
    assert world.screen.take() == [], "the bar is erased"
    world.streams.set_shown("viewer", True)
    assert world.screen.take() == [("viewer", 2, b"", b" 5%")]
    os.write(fds["stdout"], b"\nlast\n")
    world.streams.read_pending("viewer")
    assert world.screen.take() == [("viewer", 2, b" 5%\nlast\n")]
    assert world.streams.tail("viewer") == log.read_bytes() == b"hidden\nshown\n\r 5%\nlast\n"
    assert len(called) == 3
    for fd in fds.values():
        world.end(fd)
    world.streams.read_pending("viewer")
    assert world.run() == []


@pytest.mark.parametrize(
    ("pieces", "offset"),
    [
        ((), 0),
        ((b"abc",), 0),
        ((b"abc\n",), 4),
        ((b"abc\nde",), 4),
        ((b"abc\r 5%",), 4),
        ((b"a\n" * 8, b"b" * 9), 16),
        ((b"x" * 30,), 30),  # the start is not in memory
        ((b"\n" * 30, b"bc"), 30),
    ],
)
def test_where_the_unfinished_line_begins(pieces, offset):
    tail = TailBuffer(16)
    for piece in pieces:
        tail.add(piece)
    assert tail.line_start_offset == offset


@pytest.mark.parametrize("show", [(1, 2), (1,)])
def test_stderr_that_comes_another_way(world, tmp_path, show):
    """The stacks of a crashed rank follow what is in the pipe, and come also if the rank has closed that."""
    _, err = world.start(show=show, log=str(tmp_path / "log"))
    world.write(err, b"before\n")
    world.streams.add_stderr(0, b"Fatal\n")
    assert world.screen.take() == ([(0, 2, b"Fatal\n")] if 2 in show else [])
    world.end(err)
    world.run()
    world.streams.add_stderr(0, b"after")
    world.streams.add_stderr(0, b"wards\n")
    assert world.screen.take() == ([(0, 2, b"afterwards\n")] if 2 in show else [])
    assert (tmp_path / "log").read_bytes() == world.streams.tail(0) == b"before\nFatal\nafterwards\n"
