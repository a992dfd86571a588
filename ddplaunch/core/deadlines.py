"""Deadlines as data of a state machine: set, moved and cancelled by key; the machine asks which are due."""

from __future__ import annotations

from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

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

    def due(self, now: float) -> list[K]:
        """Remove and return the keys of those that are due, the earliest first."""
        keys = [key for key, at in sorted(self._at.items(), key=itemgetter(1)) if at <= now]
        for key in keys:
            del self._at[key]
        return keys
