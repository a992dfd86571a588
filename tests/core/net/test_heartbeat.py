"""Tests of heartbeats: a lost peer is found, and time that the launcher itself did not run does not count."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from ddplaunch.base.event_loop import Timer
from ddplaunch.core.net import heartbeat_monitor
from ddplaunch.core.net.heartbeat_monitor import HeartbeatMonitor

TIMEOUT = 2.0

LAG = 0.03
"""Seconds by which everything is late, so that beats and looks meet in every way."""


class Machines:
    """Two machines of one job: their time and the messages in flight; either one may be suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.stopped: set[int] = set()
        self.lost: list[tuple[int, float]] = []
        self._timers: list[tuple[float, int, int, Timer]] = []
        self._order = itertools.count()
        self._waiting: dict[int, int] = {0: 0, 1: 0}
        monkeypatch.setattr(heartbeat_monitor.time, "monotonic", lambda: self.now)
        self.heartbeats = [self._make(0)]
        self.go_on(self.now + 0.7)  # no node joins when node 0's own heartbeat is due
        self.heartbeats.append(self._make(1))
        for each in (0, 1):
            self.heartbeats[each].record(1 - each)

    def _make(self, own: int) -> HeartbeatMonitor:
        class Loop:
            def call_later(loop, seconds: float, callback: Callable[[], None]) -> Timer:
                timer = Timer(callback, self.now + seconds)
                heapq.heappush(self._timers, (timer.when, next(self._order), own, timer))
                return timer

        class Peers:
            def send_heartbeats(peers) -> None:
                self._waiting[1 - own] += 1
                if len(self.heartbeats) == 2:
                    self._read(1 - own)

            def on_silent_peer(peers, peer: int, seconds: float) -> None:
                self.lost.append((peer, seconds))

        return HeartbeatMonitor(Loop(), TIMEOUT, Peers())  # type: ignore[arg-type]

    def _read(self, own: int) -> None:
        """Descriptors before timers, as the loop has it."""
        if own not in self.stopped and self._waiting[own]:
            self._waiting[own] = 0
            self.heartbeats[own].record(1 - own)

    def go_on(self, until: float) -> None:
        """Let time pass; timers of a suspended machine wait."""
        held: list[tuple[float, int, int, Timer]] = []
        while self._timers and self._timers[0][0] <= until:
            entry = heapq.heappop(self._timers)
            due, _, own, timer = entry
            self.now = max(self.now, due + LAG)
            if own in self.stopped:
                held.append(entry)
            elif timer.callback is not None:
                self._read(own)
                timer.callback()
        for entry in held:
            heapq.heappush(self._timers, entry)
        self.now = until


@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.9, 2.1, 3.0, 30.0])
@pytest.mark.parametrize("apart", [0.0, 0.4])
def test_nodes_that_are_suspended_together_are_not_lost(monkeypatch, seconds, apart):
    """Gang scheduling, or a snapshot of virtual machines; the second one goes on a little after the first."""
    for phase in range(41):
        machines = Machines(monkeypatch)
        began = machines.now + 3 + phase * TIMEOUT / 40
        machines.go_on(began)
        machines.stopped = {0, 1}
        machines.go_on(began + seconds)
        machines.stopped = {1}
        machines.go_on(began + seconds + apart)
        machines.stopped = set()
        machines.go_on(began + seconds + 10)
        assert machines.lost == [], phase


def test_a_silent_peer_is_lost_after_the_timeout(monkeypatch):
    machines = Machines(monkeypatch)
    machines.go_on(machines.now + 3.1)
    machines.stopped = {1}
    died = machines.now
    while not machines.lost:
        machines.go_on(machines.now + 0.01)
    assert machines.lost == [(1, pytest.approx(TIMEOUT, abs=2 * LAG))]
    assert TIMEOUT * 3 / 4 - 0.02 <= machines.now - died <= TIMEOUT + 5 * LAG


def test_a_silent_peer_is_lost_on_a_busy_machine_too(monkeypatch):
    machines = Machines(monkeypatch)
    machines.stopped = {1}
    for _ in range(10):
        machines.stopped = {0, 1}
        machines.go_on(machines.now + 1.5)  # three times the interval of our beats
        machines.stopped = {1}
        machines.go_on(machines.now + 0.001)
    assert machines.lost
