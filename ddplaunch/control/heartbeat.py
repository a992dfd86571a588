"""Heartbeats: ours to every peer, and which peer has not been heard for too long.

A peer that is silent while *we* were stopped or starved is not blamed: its beats wait in our sockets, which the loop
reads before it checks the clock, and silence is measured on a clock that stands still while we do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.loop import Loop, Timer

BEATS_PER_TIMEOUT = 4
LATE = 0.25  # seconds by which our own beat may be late before the rest counts as time that we did not have


class Heartbeat:
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
        self._heard: dict[int, float] = {}  # on our clock
        self._counted = 0.0
        self._beaten = time.monotonic()
        self._beating = loop.after(self._interval, self._tick)
        self._watching: Timer | None = None

    def heard(self, peer: int) -> None:
        """Something came from ``peer``, or it has just joined."""
        self._heard[peer] = self._now()
        if self._watching is None:
            self._watch()

    def forget(self, peer: int) -> None:
        self._heard.pop(peer, None)

    def close(self) -> None:
        self._beating.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self._heard.clear()

    def _now(self) -> float:
        """Seconds that we have had: from one beat of ours to the next it is hardly more than their interval."""
        return self._counted + min(time.monotonic() - self._beaten, self._interval + LATE)

    def _tick(self) -> None:
        self._counted, self._beaten = self._now(), time.monotonic()
        self._beating = self._loop.after(self._interval, self._tick)
        self._beat()

    def _watch(self) -> None:
        """Wake when the peer that was silent longest would be too late."""
        self._watching = None
        if self._heard:
            due = min(self._heard.values()) + self._timeout
            self._watching = self._loop.after(max(0.0, due - self._now()), self._look)

    def _look(self) -> None:
        now = self._now()
        for peer, heard in list(self._heard.items()):
            if now - heard >= self._timeout and peer in self._heard:
                del self._heard[peer]
                self._silent(peer, now - heard)
        self._watch()
