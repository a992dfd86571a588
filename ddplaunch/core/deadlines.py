"""Deadlines as data of a state machine: set, moved and cancelled by name; the machine asks which are due."""

from __future__ import annotations

import time
from typing import NamedTuple

from ddplaunch.base.event_loop import Callback, EventLoop, Timer


class Now(NamedTuple):
    """The moment of an event: a machine reads no clock."""

    mono: float
    """Monotonic: deadlines and durations."""
    wall: float
    """Since 1970: what is compared with moments of other nodes."""


class Deadlines:
    """Moments by name, as monotonic times."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def set(self, name: str, at: float) -> None:
        """Set a deadline, or move it."""
        self._at[name] = at

    def cancel(self, *names: str) -> None:
        """Remove these; all of them without names."""
        for name in names or tuple(self._at):
            self._at.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    @property
    def next(self) -> float | None:
        """The earliest moment; None without deadlines."""
        return min(self._at.values(), default=None)

    def pop_due(self, now: float) -> str | None:
        """Remove and return the name of the earliest one that is due; what follows from it may cancel the others."""
        at, name = min(((at, name) for name, at in self._at.items()), default=(now, None))
        if name is None or at > now:
            return None
        del self._at[name]
        return name

    def due(self, now: float) -> list[str]:
        """Remove and return the names of those that are due, the earliest first."""
        names = [name for at, name in sorted((at, name) for name, at in self._at.items()) if at <= now]
        for name in names:
            del self._at[name]
        return names


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
