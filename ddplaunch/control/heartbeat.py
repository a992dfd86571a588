"""Heartbeats: ours to every peer, and which peer has not been heard for too long.

A peer that is silent while *we* were stopped or starved is not blamed: its beats wait in our sockets, which the loop
reads before it checks the clock, and silence is measured on a clock that stands still while we do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.loop import EventLoop, Timer

HEARTBEATS_PER_TIMEOUT = 4
SCHEDULING_SLACK_S = (
    0.25  # seconds by which our own beat may be late before the rest counts as time that we did not have
)


class HeartbeatMonitor:
    """The beats of one process with its peers, by number."""

    def __init__(
        self,
        loop: EventLoop,
        timeout_s: float,
        send_heartbeat: Callable[[], None],
        on_silent_peer: Callable[[int, float], None],
    ) -> None:
        """Call ``send_heartbeat`` several times per ``timeout_s``, ``on_silent_peer`` with a peer and how long nothing was heard of it."""
        self._loop = loop
        self._timeout = timeout_s
        self._interval = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._beat = send_heartbeat
        self._silent = on_silent_peer
        self._heard: dict[int, float] = {}  # on our clock
        self._counted = 0.0
        self._beaten = time.monotonic()
        self._beating = loop.call_later(self._interval, self._send_heartbeat)
        self._watching: Timer | None = None

    def record(self, peer: int) -> None:
        """Something came from ``peer``, or it has just joined."""
        self._heard[peer] = self._active_time()
        if self._watching is None:
            self._schedule_check()

    def remove_peer(self, peer: int) -> None:
        self._heard.pop(peer, None)

    def close(self) -> None:
        self._beating.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self._heard.clear()

    def _active_time(self) -> float:
        """Seconds that we have had: from one beat of ours to the next it is hardly more than their interval."""
        return self._counted + min(time.monotonic() - self._beaten, self._interval + SCHEDULING_SLACK_S)

    def _send_heartbeat(self) -> None:
        self._counted, self._beaten = self._active_time(), time.monotonic()
        self._beating = self._loop.call_later(self._interval, self._send_heartbeat)
        self._beat()

    def _schedule_check(self) -> None:
        """Wake when the peer that was silent longest would be too late."""
        self._watching = None
        if self._heard:
            due = min(self._heard.values()) + self._timeout
            self._watching = self._loop.call_later(max(0.0, due - self._active_time()), self._check_peers)

    def _check_peers(self) -> None:
        now = self._active_time()
        for peer, heard in list(self._heard.items()):
            if now - heard >= self._timeout and peer in self._heard:
                del self._heard[peer]
                self._silent(peer, now - heard)
        self._schedule_check()
