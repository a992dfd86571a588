"""Signals to the launcher of a node: Ctrl-\\ in a terminal, and those that the ranks have got already."""

from __future__ import annotations

import signal

from ddplaunch.core.signals import DUPLICATE_WINDOW_S

DOUBLE_PRESS_WINDOW_S = 2.0  # a second Ctrl-\ within it stops the job


class InspectKey:
    """Ctrl-\\ in a terminal: the first requests an inspection of the ranks, a second one soon after stops the job."""

    def __init__(self) -> None:
        self._last_press = -DOUBLE_PRESS_WINDOW_S

    def record_press(self, number: int, now: float) -> bool:
        """Handle a signal while stderr is a terminal; return whether it is the first Ctrl-\\. ``now``: monotonic."""
        if number != signal.SIGQUIT:
            return False
        before, self._last_press = self._last_press, now
        return now - before > DOUBLE_PRESS_WINDOW_S


class BroadcastSignalFilter:
    """Remembers signals that every process of the job got, ranks included, so that the launcher does not forward them.

    Slurm signals all processes of a step where it tracks process trees (proctrack/linuxproc). The zygote reports them.
    Moments are on the monotonic clock.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[int, float]] = []

    def record(self, number: int, now: float) -> None:
        self._recorded.append((number, now))

    def was_seen(self, number: int, now: float) -> bool:
        """Whether this signal was recorded a short time ago."""
        self._recorded = [each for each in self._recorded if now - each[1] < 3 * DUPLICATE_WINDOW_S]
        return any(each[0] == number for each in self._recorded)

    def consume(self, number: int, now: float) -> bool:
        """Return whether this signal was recorded, and remove it."""
        if found := self.was_seen(number, now):
            del self._recorded[[each[0] for each in self._recorded].index(number)]
        return found
