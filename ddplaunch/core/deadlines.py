"""Deadlines as data of a state machine: set, moved and cancelled by key; the machine asks which are due."""

from __future__ import annotations

import time
from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from ddplaunch.base.event_loop import Callback, EventLoop, Timer

K = TypeVar("K", bound=Hashable)


class Now(NamedTuple):
    """The moment of an event: a machine reads no clock."""

    mono: float
    """Monotonic: deadlines and durations."""
    wall: float
    """Since 1970: what is compared with moments of other nodes."""


class Deadlines(Generic[K]):
    """Moments by key (a name, or a frozen value that says what is due), as monotonic times."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}

    def set(self, key: K, at: float) -> None:
        """Set a deadline, or move it."""
        self._at[key] = at

    def cancel(self, *keys: K) -> None:
        """Remove these; all of them without keys."""
        for key in keys or tuple(self._at):
            self._at.pop(key, None)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    @property
    def next(self) -> float | None:
        """The earliest moment; None without deadlines."""
        return min(self._at.values(), default=None)

    def pop_due(self, now: float) -> K | None:
        """Remove and return the key of the earliest one that is due; what follows from it may cancel the others."""
        key, at = min(self._at.items(), key=itemgetter(1), default=(None, now))
        if key is None or at > now:
            return None
        del self._at[key]
        return key

    def due(self, now: float) -> list[K]:
        """Remove and return the keys of those that are due, the earliest first."""
        keys = [key for key, at in sorted(self._at.items(), key=itemgetter(1)) if at <= now]
        for key in keys:
            del self._at[key]
        return keys


class WakeTimer:
    """The one timer of whatever runs a machine: for the machine's next deadline."""

    def __init__(self, loop: EventLoop, on_due: Callback) -> None:
        self._loop, self._on_due = loop, on_due
        self._timer: Timer | None = None

    def set(self, at: float | None) -> None:
        """Set the timer, or cancel it; one that is only postponed is moved, which does not wake the loop."""
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
