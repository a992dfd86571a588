"""The event loop: what comes first."""

import os
import signal

from ddplaunch.loop import Loop


def test_a_signal_comes_before_the_other_descriptors():
    """A thousand ranks may have something to say when Ctrl-C comes."""
    loop, heard = Loop(), []
    previous = signal.getsignal(signal.SIGUSR1)
    loop.catch([signal.SIGUSR1], lambda number: heard.append("signal"))
    pipes = [os.pipe() for _ in range(20)]

    def read(number):
        heard.append(number)
        os.read(pipes[number][0], 1)
        if len(heard) == 1:
            signal.raise_signal(signal.SIGUSR1)

    for number, (reading, writing) in enumerate(pipes):
        loop.watch(reading, lambda number=number: read(number))
        os.write(writing, b"x")
    try:
        loop.step()
        loop.step()
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.set_wakeup_fd(-1)
        for pair in pipes:
            for fd in pair:
                os.close(fd)
    assert heard[1] == "signal"
    assert len(heard) == 21


def test_what_is_posted_comes_when_its_asker_is_done():
    """In order, in the same round, with what is posted meanwhile; and no round waits while something is posted."""
    loop, heard = Loop(), []

    def ask():
        loop.soon(lambda: heard.append("answer"))
        loop.soon(lambda: loop.soon(lambda: heard.append("and its own answer")))
        heard.append("asked")

    loop.soon(ask)
    assert not loop.settled
    loop.step()
    assert heard == ["asked", "answer", "and its own answer"]
    assert loop.settled


def test_a_timer_that_is_put_off_wakes_nobody():
    loop, heard = Loop(), []
    reading, writing = os.pipe()
    timer = loop.after(0.0, lambda: heard.append("put off"))
    timer.when += 3600
    loop.after(0.0, lambda: heard.append("on time"))
    loop.watch(reading, lambda: heard.append(os.read(reading, 1)))
    loop.step()
    assert heard == ["on time"]
    os.write(writing, b"x")
    loop.step()
    assert heard == ["on time", b"x"]
    timer.when = 0.0  # an earlier moment counts when the later one has come
    timer.cancel()
    loop.after(0.0, lambda: heard.append("last"))
    loop.step()
    assert heard[2:] == ["last"]
    os.close(reading)
    os.close(writing)


def test_timers_that_are_cancelled_take_no_room():
    """A door that is much asked sets some for each request, and cancels them seconds before their time."""
    loop, rung = Loop(), []
    callback = rung.append
    loop.after(3600, lambda: None)
    kept = loop.after(0, lambda: callback("kept"))
    for _ in range(10_000):
        loop.after(5, lambda: callback("cancelled")).cancel()
    assert len(loop._timers) < 1000
    loop.step()
    assert rung == ["kept"]
    assert kept.callback is not None
