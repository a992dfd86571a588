"""The one event loop: descriptors, timers and signals; it sleeps in the kernel until one of them has news."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType

Callback = Callable[[], None]


class Timer:
    """One call in the future, unless cancelled."""

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Calls back when a descriptor is ready, a time has come or a signal has arrived; all in the calling thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: list[int] = []
        self._previous: dict[int, object] = {}

    def watch(self, fd: int, callback: Callback, *, write: bool = False) -> None:
        """Call ``callback`` whenever ``fd`` is readable (or writable); a second call for it replaces the first."""
        events = selectors.EVENT_WRITE if write else selectors.EVENT_READ
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; does nothing where it was not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds: float, callback: Callback) -> Timer:
        """Call ``callback`` once, ``seconds`` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def catch(self, numbers: Iterable[int], callback: Callable[[int], None]) -> None:
        """Call ``callback`` with each of these signals; one that we inherited as ignored (nohup) stays ignored."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, note)

        def deliver() -> None:
            os.read(woken, 4096)
            while self._signals:
                callback(self._signals.pop(0))

        self.watch(woken, deliver)

    def step(self) -> None:
        """Wait for the next thing to happen and handle all that has happened by then."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            # An earlier callback of this round may have closed this descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()
