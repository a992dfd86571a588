"""Tests of the screen on recording sinks: rows at the bottom, colours, held output and tracebacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.events import JobEnded, JobStalled, NoteAdded, Restarting
from ddplaunch.core.failures import FailureReport, RankFailure
from ddplaunch.core.node_config import ScreenOptions
from ddplaunch.core.output import screen as screen_module
from ddplaunch.core.output import wait_footer
from ddplaunch.core.output.line_merger import HOLD_S
from ddplaunch.core.output.screen import HIGH_WATER_BYTES, Screen, TerminalScreen
from ddplaunch.core.output.wait_footer import LOG_REPEAT_S, WaitFooter

CLEAR = b"\r\x1b[K"
TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: no\n"


class RecordingSink:
    """A terminal, or a file, that records what is written."""

    is_full = False

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.written, self.drained = is_terminal, [], 0

    def write(self, data: bytes) -> None:
        if data:
            self.written.append(data)

    def on_drained(self) -> None:
        self.drained += 1

    def take(self) -> bytes:
        written, self.written = b"".join(self.written), []
        return written


@pytest.fixture
def world(monkeypatch):
    """Make a screen on recording sinks, with timers that the test calls, and the prefixes of ranks 0, 1 and 11."""

    def make(kind=TerminalScreen, terminals=(1, 2), colour=False, merge=False):
        sinks = {1: RecordingSink(1 in terminals)}
        sinks[2] = sinks[1] if terminals == (1, 2) else RecordingSink(2 in terminals)
        monkeypatch.setattr(screen_module, "Sink", lambda loop, fd, timeout: sinks[fd])
        monkeypatch.setattr(screen_module, "_same_file", lambda one, two: sinks[1] is sinks[2])
        monkeypatch.setattr(screen_module, "window_size", lambda fd: (20, 10))
        loop, timers = EventLoop(), []
        loop.call_later = lambda seconds, callback: timers.append((seconds, callback))
        screen = kind(loop, ScreenOptions("[{rank}]", 10.0, 0.0, colour, merge))
        screen._prefixes, screen._width = {0: "[0]", 1: "[1]", 11: "[11]"}, 4
        return SimpleNamespace(screen=screen, out=sinks[1], err=sinks[2], timers=timers)

    return make


def test_the_bottom_row_is_the_bar_of_the_lowest_rank_and_of_programs_last(world):
    w = world()
    w.screen.show_lines("board", 2, b"", b"loading")
    assert w.out.take() == b"[board] loading"
    w.screen.show_lines(11, 2, b"", b"10%")
    assert w.out.take() == CLEAR + b"[11] 10%"
    w.screen.show_lines(1, 1, b"step\n", b"20%")
    assert w.out.take() == CLEAR + b"[1]  step\n[1]  20%"
    w.screen.show_lines(11, 2, b"", b"wider than the terminal")
    assert w.out.take() == CLEAR + b"[1]  20%"
    w.screen.show_lines(1, 1, b"20%\n")
    assert w.out.take() == CLEAR + b"[1]  20%\n[11] wider than the", "a wrapped row cannot be redrawn"
    w.screen.show_lines(11, 2, b"")
    assert w.out.take() == CLEAR + b"[board] loading"
    w.screen.show_lines("board", 2, b"")
    assert w.out.take() == CLEAR
    w.screen.show_lines(0, 1, b"")
    assert w.out.take() == b""


def test_a_bar_is_in_the_terminal_that_its_stream_has(world):
    w = world(terminals=(2,))
    w.screen.show_lines(0, 1, b"line\n", b"10%")
    assert (w.out.take(), w.err.take()) == (b"[0]  line\n", b"")
    w.screen.show_lines(0, 2, b"", b"20%")
    assert (w.out.take(), w.err.take()) == (b"", b"[0]  20%")


def test_the_footer_gives_way_to_a_bar_and_to_input(world):
    w = world()
    w.screen.show_footer("waiting")
    assert w.out.take() == b"ddplaunch: waiting ", "as wide as the terminal"
    w.screen.show_input_row(b"(ddp) p x")
    assert w.out.take() == CLEAR + b"(ddp) p x"
    w.screen.show_lines(0, 1, b"a\n", b"5%")
    assert w.out.take() == CLEAR + b"[0]  a\n(ddp) p x"
    w.screen.show_input_row(b"")
    assert w.out.take() == CLEAR + b"[0]  5%"
    w.screen.show_lines(0, 1, b"")
    assert w.out.take() == CLEAR + b"ddplaunch: waiting "
    w.screen.show_footer("")
    assert w.out.take() == CLEAR


def test_what_concerns_the_job_is_shown_by_one_node(world):
    w = world(Screen, terminals=())
    for reports_job, shown in ((True, b"ddplaunch: a\nddplaunch: b\nddplaunch: c (00:00)\n"), (False, b"")):
        w.screen.reports_job = reports_job
        w.screen.observe(NoteAdded("a"))
        w.screen.observe(JobStalled(1.0, "b"))
        w.screen.observe(JobStalled(1.0, ""))
        w.screen.show_footer("c", of_job=True)
        w.screen.show_footer("", of_job=True)
        assert w.err.take() == shown
    w.screen.show_note("own")
    w.screen.show_footer("own wait")
    assert w.err.take() == b"ddplaunch: own\nddplaunch: own wait (00:00)\n"
    assert w.out.take() == b""


def test_output_is_held_while_another_program_draws(world):
    w = world()
    w.screen.show_lines(0, 1, b"before\n")
    w.out.take()
    w.screen.hold_output(True)
    w.screen.write_raw(b"frame")
    w.screen.show_lines(0, 1, b"held\n", b"5%")
    w.screen.show_note("held too")
    assert w.out.take() == b"frame"
    assert not w.screen.is_full
    w.screen.show_lines(0, 1, b"x" * HIGH_WATER_BYTES + b"\n")
    assert w.screen.is_full
    w.screen.hold_output(False)
    assert w.out.take().startswith(b"[0]  held\nddplaunch: held too\n[0]  xxx")
    assert (w.screen.is_full, w.out.drained) == (False, 1)
    w.screen.hold_output(False)
    assert (w.out.take(), w.out.drained) == (b"", 1)
    w.screen.print_text("asked for\n")
    assert w.out.take() == b"asked for\n"


def test_colours(world):
    w = world(colour=True, merge=True)
    for rank in (0, 1, 11):
        w.screen.show_lines(rank, 1, b"")
    for rank, colour in ((0, b"36"), (1, b"33"), (11, b"33")):
        w.screen.show_lines(rank, 1, b"of %d\n" % rank)
        w.screen.print_text("")
        assert w.out.take() == b"\x1b[%sm%s\x1b[0m of %d\n" % (colour, (b"[%d]" % rank).ljust(4), rank)
    for rank in (0, 1, 11):
        w.screen.show_lines(rank, 1, b"equal\n")
    assert w.out.take() == b"\x1b[1m[0-1,11]\x1b[0m equal\n"
    w.screen.show_lines("board", 2, b"x\n")
    assert w.out.take() == b"\x1b[2m[board] \x1b[0m x\n"
    plain = world(Screen, terminals=(), colour=True)
    plain.screen.show_lines(0, 1, b"x\n")
    assert plain.out.take() == b"[0]  x\n"


@pytest.mark.parametrize("terminals", [(), (1, 2)])
def test_a_mark_comes_once_to_each_stream_after_the_lines_before(world, terminals):
    w = world(Screen, terminals, merge=True)
    for rank in (0, 1):
        w.screen.show_lines(rank, 1, b"")
    w.screen.show_lines(0, 1, b"held\n")
    w.screen.write_marker(b"mark\n")
    assert w.out.take() == b"[0]  held\nmark\n"
    assert w.err.take() == (b"" if terminals else b"mark\n")


def test_the_prefix_of_torch_is_removed_if_there_is_one_of_ours(world):
    w = world(Screen, terminals=())
    for number in (1, 2):
        w.screen.show_lines(1, number, b"[rank1]: a\n[rank1]: b [rank1]: c\n[rank0]: d\n")
    assert w.err.take() == b"[1]  a\n[1]  b [rank1]: c\n[1]  [rank0]: d\n"
    assert w.out.take() == b"[1]  [rank1]: a\n[1]  [rank1]: b [rank1]: c\n[1]  [rank0]: d\n"
    w.screen._prefixes[1] = "[host]"
    w.screen.show_lines(1, 2, b"[rank1]: a\n")
    assert w.err.take() == b"[host] [rank1]: a\n"


def test_held_lines_are_shown_after_a_moment_or_at_the_end(world, monkeypatch):
    w, clock = world(Screen, terminals=(), merge=True), SimpleNamespace(now=1000.0)
    monkeypatch.setattr(screen_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for rank in (0, 1):
        w.screen.show_lines(rank, 1, b"")
    w.screen.show_lines(0, 1, b"a\n")
    w.screen.show_lines(0, 1, b"b\n")
    (timer,) = w.timers
    assert (w.out.take(), timer[0]) == (b"", pytest.approx(HOLD_S))
    clock.now += HOLD_S + 0.01
    timer[1]()
    assert w.out.take() == b"[0]  a\n[0]  b\n"
    w.screen.show_lines(1, 1, b"c\n")
    assert len(w.timers) == 2
    for rank in (0, 1):
        w.screen.show_lines(rank, 1, b"", last=True)
    assert w.out.take() == b"[1]  c\n"


def make_verdict(traceback: str) -> FailureReport:
    first = RankFailure(0, 0, "n0", 1, 0, 1, None, "ValueError: no", traceback, 1.0, None)
    return FailureReport(first, (1,), (), 0, 12)


@pytest.mark.parametrize(
    ("event", "reports_job", "shown"),
    [
        (JobEnded(1, make_verdict(TRACEBACK.decode()), None), True, [11]),
        (JobEnded(1, make_verdict(TRACEBACK.decode() * 2), None), True, [0, 1, 11]),
        (JobEnded(1, make_verdict(TRACEBACK.decode()), None), False, [0, 1, 11]),
        (JobEnded(130, None, None), True, [0, 1, 11]),
        (Restarting(1, 0.0, "again", make_verdict(TRACEBACK.decode())), False, [0, 1, 11]),
        (Restarting(1, 0.0, "again", make_verdict(TRACEBACK.decode())), True, [0, 1, 11]),
        (None, True, [0, 1, 11]),
    ],
    ids=["in the report", "with a cause", "no report here", "no failure", "elsewhere", "restart", "timeout"],
)
def test_a_traceback_that_the_report_has_is_not_shown_twice(world, event, reports_job, shown):
    w = world(Screen, terminals=())
    w.screen.reports_job = reports_job
    for rank in (0, 1, 11):
        w.screen.hold_traceback(rank, TRACEBACK)
    assert (w.err.take(), [seconds for seconds, _ in w.timers]) == (b"", [screen_module.TRACEBACK_S] * 3)
    if event is None:
        w.timers[0][1]()
    else:
        w.screen.observe(event)
    lines = w.err.take().splitlines()
    assert lines.count(b"ddplaunch: again") == (isinstance(event, Restarting) and reports_job)
    w.timers[1][1]()
    assert w.err.take() == b"", "each once"
    assert [line for line in lines if b"ValueError" in line] == [
        b"%s ValueError: no" % (b"[%d]" % rank).ljust(4) for rank in shown
    ]


@pytest.mark.parametrize(("shows_seconds", "interval"), [(True, 1.0), (False, LOG_REPEAT_S)])
def test_a_wait_is_shown_after_a_while_with_its_duration(monkeypatch, shows_seconds, interval):
    clock, timers, shown = SimpleNamespace(now=1000.25), [], []
    monkeypatch.setattr(wait_footer, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def call_later(seconds, callback):
        timers.append(SimpleNamespace(when=clock.now + seconds, callback=callback, cancel=lambda: cancelled.append(1)))
        return timers[-1]

    cancelled, loop = [], SimpleNamespace(call_later=call_later)
    footer = WaitFooter(loop, SimpleNamespace(write_footer=shown.append), 2.0, shows_seconds=shows_seconds)
    footer.set_text("node 1")
    footer.set_text("node 1")
    assert (shown, [timer.when for timer in timers]) == ([], [1002.25])
    clock.now = 1002.5
    timers[-1].callback()
    assert (shown, timers[-1].when) == (["node 1 (00:02)"], 1002.25 + interval), "the next full second"
    clock.now = 1003.0
    footer.set_text("node 2")
    assert shown[1:] == ["node 2 (00:02)"]
    footer.set_text("")
    assert (shown[2:], len(cancelled), len(timers)) == ([""], 3, 3)
    footer.set_text("node 3", waited=60.0)
    assert shown[3:] == ["node 3 (01:00)"]
    footer.set_text("")
    footer.set_text("node 4", waited=0.5)
    assert timers[-1].when == 1004.5


def test_one_stream_on_a_terminal_is_enough_for_its_screen(monkeypatch):
    for terminals, kind in (((), Screen), ((1,), TerminalScreen), ((2,), TerminalScreen)):
        monkeypatch.setattr(screen_module, "is_interactive", terminals.__contains__)
        assert type(screen_module.make_screen(EventLoop(), ScreenOptions("", 10.0, 0.0, colour=False))) is kind
