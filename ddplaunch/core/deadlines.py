"""Deadlines as data of a state machine: set, moved and cancelled by key; the machine asks which are due."""

from __future__ import annotations

from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)


class Now(NamedTuple):
    """The time of an event, on both clocks; state machines get it with the event and read no clock."""

    mono: float
    """Monotonic seconds, for deadlines and durations."""
    wall: float
    """Seconds since 1970, to compare with times of other nodes."""


class Deadline(Struct, frozen=True):
    """Base class of the keys of deadlines: what a state machine does when the deadline is due."""


class Deadlines(Generic[K]):
    """The deadlines of a state machine: monotonic times by key. A key is a frozen value that says what is due."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}

    def set(self, key: K, at: float) -> None:
        """Set a deadline, or move it."""
        self._at[key] = at

    def cancel(self, *keys: K) -> None:
        """Cancel the deadlines of these keys; without keys, all."""
        for key in keys or tuple(self._at):
            self._at.pop(key, None)

    def cancel_all(self, kind: type[K]) -> None:
        """Cancel all deadlines whose key is of this type."""
        for key in [key for key in self._at if isinstance(key, kind)]:
            del self._at[key]

    def __contains__(self, key: K) -> bool:
        return key in self._at

    @property
    def next(self) -> float | None:
        """The monotonic time of the earliest deadline; None if there is none."""
        return min(self._at.values(), default=None)

    def pop_due(self, now: float) -> K | None:
        """Remove the earliest deadline that is due and return its key; only one, as its effects may cancel others."""
        key, at = min(self._at.items(), key=itemgetter(1), default=(None, now))
        if key is None or at > now:
            return None
        del self._at[key]
        return key
