"""Tests of the event loop: order of callbacks, timers and sockets."""

import os
import signal

from ddplaunch.base.event_loop import EventLoop


def test_a_signal_comes_before_the_other_descriptors():
    """Ctrl-C is handled first even if a thousand ranks have written."""
    loop, calls = EventLoop(), []
    previous = signal.getsignal(signal.SIGUSR1)
    loop.add_signal_handlers([signal.SIGUSR1], lambda number: calls.append("signal"))
    pipes = [os.pipe() for _ in range(20)]

    def read(number):
        calls.append(number)
        os.read(pipes[number][0], 1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)

    for number, (reading, writing) in enumerate(pipes):
        loop.watch_fd(reading, lambda number=number: read(number))
        os.write(writing, b"x")
    try:
        loop.run_once()
        loop.run_once()
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.set_wakeup_fd(-1)
        for pair in pipes:
            for fd in pair:
                os.close(fd)
    assert calls[1] == "signal"
    assert len(calls) == 21


def test_a_posted_call_comes_after_its_caller_is_done():
    """Calls run in order and in the same round, also those that are posted meanwhile.

    No round waits while a call is posted.
    """
    loop, calls = EventLoop(), []

    def ask():
        loop.call_soon(lambda: calls.append("answer"))
        loop.call_soon(lambda: loop.call_soon(lambda: calls.append("and its own answer")))
        calls.append("asked")

    loop.call_soon(ask)
    assert not loop.is_idle
    loop.run_once()
    assert calls == ["asked", "answer", "and its own answer"]
    assert loop.is_idle


def test_a_timer_that_is_put_off_does_not_wake_the_loop():
    loop, calls = EventLoop(), []
    reading, writing = os.pipe()
    timer = loop.call_later(0.0, lambda: calls.append("put off"))
    timer.when += 3600
    loop.call_later(0.0, lambda: calls.append("on time"))
    loop.watch_fd(reading, lambda: calls.append(os.read(reading, 1)))
    loop.run_once()
    assert calls == ["on time"]
    os.write(writing, b"x")
    loop.run_once()
    assert calls == ["on time", b"x"]
    timer.when = 0.0  # an earlier moment counts when the later one has come
    timer.cancel()
    loop.call_later(0.0, lambda: calls.append("last"))
    loop.run_once()
    assert calls[2:] == ["last"]
    os.close(reading)
    os.close(writing)


def test_timers_that_are_cancelled_take_no_room():
    """A busy control socket sets timers for each request, and cancels them seconds before they are due."""
    loop, rung = EventLoop(), []
    callback = rung.append
    loop.call_later(3600, lambda: None)
    kept = loop.call_later(0, lambda: callback("kept"))
    for _ in range(10_000):
        loop.call_later(5, lambda: callback("cancelled")).cancel()
    assert len(loop._timers) < 1000
    loop.run_once()
    assert rung == ["kept"]
    assert kept.callback is not None
