"""Signal forwarding: which signals launchers pass on to the ranks, and how one sent to several nodes is passed on once.

A scheduler signals the launchers of all nodes, a user one of them. Ranks are in sessions of their own, so none of them
gets it directly: the launcher of every node forwards it.
"""

from __future__ import annotations

import signal

from msgspec import Struct, field

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""The launcher handles these, unless it inherited them as ignored."""

FORWARDED_SIGNALS = frozenset(
    {
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGXCPU),
        *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
    }
)
"""Signals whose meaning a program may define. The others end it, or report an error of its own."""

DUPLICATE_WINDOW_S = 2.0  # a scheduler has signalled all nodes within this time


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
