"""Deadlines as data of a state machine: set, moved and cancelled by key; the machine asks which are due."""

from __future__ import annotations

from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)


class Now(NamedTuple):
    """The moment of an event: a machine reads no clock."""

    mono: float
    """Monotonic: deadlines and durations."""
    wall: float
    """Since 1970: what is compared with moments of other nodes."""


class Deadline(Struct, frozen=True):
    """What a machine does when a moment has come."""


class Deadlines(Generic[K]):
    """Moments by key, a frozen value that says what is due, as monotonic times."""

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
        """Remove those of this type."""
        for key in [key for key in self._at if isinstance(key, kind)]:
            del self._at[key]

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
