"""Signals that are for the ranks: which these are, and how one that came to several nodes is passed on once.

A scheduler sends a signal to the launchers of all nodes, a person to one of them. Ranks lead sessions of their own, so
that it reaches none of them by itself, and each of all nodes gets it from its launcher.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ddplaunch.dataclass import dataclass, field

FORWARDED_SIGNALS = frozenset(
    {
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGXCPU),
        *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
    }
)
"""Those with which a program may agree on anything. The others end it, or tell of a fault of its own."""

DUPLICATE_WINDOW_S = 2.0  # seconds within which a scheduler has told all nodes


@dataclass
class _ForwardedSignal:
    number: int
    moment: float
    nodes: set[int] = field(default_factory=set)  # where it has come to


class SignalDeduplicator:
    """What has come to the nodes of a job lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passed: list[_ForwardedSignal] = []

    def should_forward(self, node: int, number: int) -> bool:
        """Take in that a signal has come to a node; return whether the ranks have yet to get it."""
        now = self._clock()
        self._passed = [each for each in self._passed if now - each.moment < DUPLICATE_WINDOW_S]
        for each in self._passed:
            if each.number == number and node not in each.nodes:
                each.nodes.add(node)
                return False
        self._passed.append(_ForwardedSignal(number, now, {node}))
        return True
