"""Heartbeats: sends them to every peer, and detects peers whose heartbeats have stopped.

A suspension or starvation of this process does not count as a peer's silence: the peer's heartbeats are in the socket,
which the loop reads before the timers, and silence is measured on a clock that stops while this process does.
"""

from __future__ import annotations

import time
from typing import Protocol

from ddplaunch.base.event_loop import EventLoop, Timer

HEARTBEATS_PER_TIMEOUT = 4
SCHEDULING_SLACK_S = 0.25  # if an own heartbeat is later, this process did not run: the time beyond does not count


class HeartbeatHandler(Protocol):
    """The owner of the connections to the peers: sends the heartbeats, and handles the loss of a peer."""

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every peer."""

    def on_silent_peer(self, peer: int, seconds: float) -> None:
        """Called once for a peer that has sent nothing for ``seconds``, the timeout or longer."""


class HeartbeatMonitor:
    """The heartbeats of one process with its peers, by node rank."""

    def __init__(self, loop: EventLoop, timeout_s: float, listener: HeartbeatHandler) -> None:
        """Heartbeats are sent HEARTBEATS_PER_TIMEOUT times per ``timeout_s``."""
        self._loop, self._listener = loop, listener
        self._timeout = timeout_s
        self._interval = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._last_received: dict[int, float] = {}  # when each peer's last message arrived, in active time
        self._active_until = 0.0  # active time at ``_sent_at``
        self._sent_at = time.monotonic()
        self._send_timer = loop.call_later(self._interval, self._send_heartbeats)
        self._check_timer: Timer | None = None

    def record(self, peer: int) -> None:
        """Called when ``peer`` has sent anything, or has just joined."""
        self._last_received[peer] = self._active_time()
        if self._check_timer is None:
            self._schedule_check()

    def remove_peer(self, peer: int) -> None:
        self._last_received.pop(peer, None)

    def close(self) -> None:
        self._send_timer.cancel()
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._last_received.clear()

    def _active_time(self) -> float:
        """Seconds in which this process ran: at most the interval and some slack for each own heartbeat."""
        return self._active_until + min(time.monotonic() - self._sent_at, self._interval + SCHEDULING_SLACK_S)

    def _send_heartbeats(self) -> None:
        self._active_until, self._sent_at = self._active_time(), time.monotonic()
        self._send_timer = self._loop.call_later(self._interval, self._send_heartbeats)
        self._listener.send_heartbeats()

    def _schedule_check(self) -> None:
        """Set the timer for the peer that has been silent longest."""
        self._check_timer = None
        if self._last_received:
            due = min(self._last_received.values()) + self._timeout
            self._check_timer = self._loop.call_later(max(0.0, due - self._active_time()), self._check_peers)

    def _check_peers(self) -> None:
        now = self._active_time()
        for peer, received in list(self._last_received.items()):
            if now - received >= self._timeout and peer in self._last_received:
                del self._last_received[peer]
                self._listener.on_silent_peer(peer, now - received)
        self._schedule_check()
