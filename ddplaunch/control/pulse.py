"""Heartbeats: ours to every peer, and which peer has not been heard for too long.

A peer that is silent while *we* were stopped or starved is not blamed: its beats wait in our sockets, which the loop
reads before it looks at the clock, and what time we lost ourselves is added to everybody's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.loop import Loop, Timer

BEATS_PER_TIMEOUT = 4

LATE = 0.25
"""Seconds by which a timer may be late before the time counts as lost by us."""


class Pulse:
    """The beats of one process with its peers, by number."""

    def __init__(
        self, loop: Loop, timeout: float, beat: Callable[[], None], silent: Callable[[int, float], None]
    ) -> None:
        """Call ``beat`` several times per ``timeout``, ``silent`` with a peer and how long nothing was heard of it."""
        self._loop = loop
        self._timeout = timeout
        self._interval = timeout / BEATS_PER_TIMEOUT
        self._beat = beat
        self._silent = silent
        self._heard: dict[int, float] = {}
        self._beating = loop.after(self._interval, self._tick)
        self._watching: Timer | None = None

    def heard(self, peer: int) -> None:
        """Something came from ``peer``, or it has just joined."""
        self._heard[peer] = time.monotonic()
        if self._watching is None:
            self._watch()

    def forget(self, peer: int) -> None:
        self._heard.pop(peer, None)

    def close(self) -> None:
        self._beating.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self._heard.clear()

    def _tick(self) -> None:
        self._beating = self._loop.after(self._interval, self._tick)
        self._beat()

    def _watch(self) -> None:
        """Wake when the peer that was silent longest would be too late."""
        self._watching = None
        if self._heard:
            due = min(self._heard.values()) + self._timeout
            self._watching = self._loop.after(max(0.0, due - time.monotonic()), self._look)

    def _look(self) -> None:
        assert self._watching is not None
        now = time.monotonic()
        late = now - self._watching.due
        if late > LATE:
            self._heard = {peer: min(now, heard + late) for peer, heard in self._heard.items()}
        for peer, heard in list(self._heard.items()):
            if now - heard >= self._timeout and peer in self._heard:
                del self._heard[peer]
                self._silent(peer, now - heard)
        self._watch()
