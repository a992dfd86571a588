"""Deadlines as data of a state machine: set, moved and cancelled by name; the machine asks which are due."""

from __future__ import annotations

from typing import NamedTuple


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

    def due(self, now: float) -> list[str]:
        """Remove and return the names of those that are due, the earliest first."""
        names = [name for at, name in sorted((at, name) for name, at in self._at.items()) if at <= now]
        for name in names:
            del self._at[name]
        return names
