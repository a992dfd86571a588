"""The launcher's event loop: file descriptors (epoll), timers and signals, single-threaded."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from selectors import EVENT_READ, EVENT_WRITE

Callback = Callable[[], object]

_MAX_CANCELLED_TIMERS = 256  # with more timers, remove cancelled ones


class Timer:
    """A callback that the event loop calls once at a given time, unless the timer is cancelled first."""

    def __init__(self, callback: Callback, when: float) -> None:
        self.callback: Callback | None = callback
        self.when = when  # on the monotonic clock; may be set later, at no cost and without waking the loop

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """A group of timers that are cancelled together."""

    def __init__(self, call_later: Callable[[float, Callback], Timer]) -> None:
        """``call_later`` is the event loop's method of that name."""
        self._call_later = call_later
        self._all: list[Timer] = []

    def call_later(self, seconds: float, callback: Callback) -> None:
        self._all.append(self._call_later(seconds, callback))

    def cancel_all(self) -> None:
        for timer in self._all:
            timer.cancel()
        self._all.clear()


class EventLoop:
    """Runs callbacks when a file descriptor is ready, a timer is due or a signal has come, in the calling thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._cleanup_size = _MAX_CANCELLED_TIMERS
        self._order = itertools.count()
        self._signals: list[int] = []
        self._handlers: dict[int, list[Callable[[int], object]]] = {}
        self._soon: deque[Callback] = deque()

    def watch_fd(self, fd: int, callback: Callback, *, write: bool = False) -> None:
        """Call ``callback`` whenever ``fd`` is readable (or writable); a second call replaces the callback."""
        event = EVENT_WRITE if write else EVENT_READ
        known = self._selector.get_map().get(fd)
        callbacks = {**(known.data if known else {}), event: callback}
        put = self._selector.modify if known else self._selector.register
        put(fd, sum(callbacks), callbacks)

    def unwatch_fd(self, fd: int, *, write: bool | None = None) -> None:
        """Stop watching ``fd``; ``write``: only for writing or only for reading. Does nothing if it is not watched."""
        known = self._selector.get_map().get(fd)
        if known is None:
            return
        gone = known.events if write is None else EVENT_WRITE if write else EVENT_READ
        if callbacks := {event: callback for event, callback in known.data.items() if not event & gone}:
            self._selector.modify(fd, sum(callbacks), callbacks)
        else:
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(callback, time.monotonic() + seconds)
        if len(self._timers) >= self._cleanup_size:  # most are cancelled long before they are due
            self._timers = [each for each in self._timers if each[2].callback is not None]
            heapq.heapify(self._timers)
            self._cleanup_size = max(_MAX_CANCELLED_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callback) -> None:
        """Call ``callback`` at the end of the current loop iteration, never inside the call that schedules it."""
        self._soon.append(callback)

    @property
    def is_idle(self) -> bool:
        """Whether no callback of ``call_soon`` is waiting."""
        return not self._soon

    def add_signal_handlers(
        self, numbers: Iterable[int], callback: Callable[[int], None], *, even_if_ignored: Iterable[int] = ()
    ) -> None:
        """Call ``callback`` with the signal number whenever one of these signals arrives, after callbacks added before.

        A signal that was inherited as ignored (nohup) stays ignored, unless it is in ``even_if_ignored``. The signals
        are unblocked here: until now they may have been blocked, so that none was lost or killed the launcher.
        """
        if not self._handlers:
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            self.watch_fd(read_end, lambda: os.read(read_end, 4096))
        wanted = {*numbers, *even_if_ignored}
        for number in wanted:
            self._handlers.setdefault(number, []).append(callback)
            if number in even_if_ignored or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._signals.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)

    def run_once(self) -> None:
        """Wait for the next event; handle all that are ready: descriptors, then timers, then ``call_soon`` callbacks.

        Signals are handled after each descriptor callback, as there may be thousands of descriptors.
        """
        self._pop_cancelled_timers()
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, mask in self._selector.select(0 if self._soon else timeout):
            for event in (EVENT_READ, EVENT_WRITE):
                # An earlier callback of this round may have closed this descriptor, or given it another callback.
                known = self._selector.get_map().get(key.fd)
                if mask & event and known is not None and known.data.get(event) is key.data.get(event):
                    known.data[event]()
                    while self._signals:
                        for callback in self._handlers[number := self._signals.pop(0)]:
                            callback(number)
        while self._pop_cancelled_timers() and self._timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()
        while self._soon:
            self._soon.popleft()()

    def _pop_cancelled_timers(self) -> bool:
        """Remove cancelled timers at the front of the heap, reorder postponed ones; return whether a timer is left."""
        while self._timers:
            when, _, timer = self._timers[0]
            if timer.callback is None:
                heapq.heappop(self._timers)
            elif timer.when > when:
                heapq.heapreplace(self._timers, (timer.when, next(self._order), timer))
            else:
                return True
        return False


class WakeTimer:
    """A timer for the next deadline of a state machine; a new deadline replaces the previous one."""

    def __init__(self, loop: EventLoop, on_due: Callback) -> None:
        self._loop, self._on_due = loop, on_due
        self._timer: Timer | None = None

    def set(self, at: float | None) -> None:
        """Set the deadline, or cancel it if ``at`` is None; a later deadline reuses the timer that is already set."""
        timer = self._timer
        if at is not None and timer is not None and timer.callback is not None and timer.when <= at:
            timer.when = at
            return
        if timer is not None:
            timer.cancel()
        self._timer = None if at is None else self._loop.call_later(at - time.monotonic(), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._on_due()
