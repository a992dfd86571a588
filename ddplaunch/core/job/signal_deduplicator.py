"""Passes on once a signal that several nodes have got: a scheduler signals the launchers of all nodes."""

from __future__ import annotations

from msgspec import Struct, field

from ddplaunch.core.signals import DUPLICATE_WINDOW_S


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
