"""Signals of launchers: which ones they pass on to the ranks, and how one sent to several nodes is passed on once.

A scheduler signals the launchers of all nodes, a user one of them. Ranks are in sessions of their own, so none of them
gets it directly: the launcher of every node forwards it.
"""

from __future__ import annotations

import signal

from msgspec import Struct, field

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""The launcher handles these, unless it inherited them as ignored."""

DUPLICATE_WINDOW_S = 2.0  # a scheduler has signalled all nodes within this time
DOUBLE_PRESS_WINDOW_S = 2.0  # a second Ctrl-\ within it stops the job


class _ForwardedSignal(Struct):
    number: int
    moment: float
    nodes: set[int] = field(default_factory=set)  # whose launchers got it


class SignalDeduplicator:
    """Remembers which signals were forwarded recently, and which nodes got them."""

    def __init__(self) -> None:
        self._forwarded: list[_ForwardedSignal] = []

    def should_forward(self, node: int, number: int, now: float) -> bool:
        """Record that a node's launcher got a signal; return False if it was forwarded already for another node."""
        self._forwarded = [each for each in self._forwarded if now - each.moment < DUPLICATE_WINDOW_S]
        for each in self._forwarded:
            if each.number == number and node not in each.nodes:
                each.nodes.add(node)
                return False
        self._forwarded.append(_ForwardedSignal(number, now, {node}))
        return True


class InspectKey:
    """Ctrl-\\ in a terminal: the first requests an inspection of the ranks, a second one soon after stops the job."""

    def __init__(self) -> None:
        self._last_press = -DOUBLE_PRESS_WINDOW_S

    def is_pressed(self, number: int, now: float) -> bool:
        """Handle a signal while stderr is a terminal; return whether it is the first Ctrl-\\. ``now``: monotonic."""
        if number != signal.SIGQUIT:
            return False
        before, self._last_press = self._last_press, now
        return now - before > DOUBLE_PRESS_WINDOW_S


class BroadcastSignalFilter:
    """Signals that were sent to every process of the job, ranks included: the launcher must not forward them.

    Slurm signals a step like that where it tracks process trees (proctrack/linuxproc). The zygote gets them too.
    Moments are on the monotonic clock.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[int, float]] = []

    def record(self, number: int, now: float) -> None:
        self._recorded.append((number, now))

    def was_seen(self, number: int, now: float) -> bool:
        """Whether this signal was recorded within the last moments."""
        self._recorded = [each for each in self._recorded if now - each[1] < 3 * DUPLICATE_WINDOW_S]
        return any(each[0] == number for each in self._recorded)

    def consume(self, number: int, now: float) -> bool:
        """Return whether this signal was recorded, and remove it."""
        if found := self.was_seen(number, now):
            del self._recorded[[each[0] for each in self._recorded].index(number)]
        return found
