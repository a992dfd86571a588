"""Tests that clock offsets of two nodes are measured within the stated error, also under faults."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from ddplaunch.core.clock_offset import MAX_DRIFT, UNKNOWN, ClockReading, PeerClock, boottime
from ddplaunch.core.messages import HeartbeatMessage

EVERY = 3.75  # seconds between two beats, by default


class Machine:
    """One end of a connection: a wall clock with an error, which may be set, and a monotonic one, which may stop."""

    def __init__(self, world, ahead=0.0, drift=0.0):
        self.world, self.ahead, self.drift, self.asleep = world, ahead, drift, 0.0
        self.peer = PeerClock()

    def wall(self):
        return 1.79e9 + self.world.now * (1 + self.drift) + self.ahead

    def steady(self):
        return 500 * id(self) % 9999 + self.world.now * (1 + self.drift) - self.asleep

    @property
    def now(self):
        return ClockReading(self.wall(), self.steady())

    @property
    def offset(self):
        """Return the measured offset of the other end's clock."""
        return self.peer.best_offset(self.now)


class World:
    """Two machines, and beats on their way between them."""

    def __init__(self, ahead, *, there=0.0001, back=0.0001, jitter=0.0, drift=0.0):
        self.now, self.delays, self.jitter = 0.0, (there, back), jitter
        self.ends = [Machine(self), Machine(self, ahead, drift)]
        self._chance = random.Random(1)
        self._order = itertools.count()
        self._events = [(0.4, next(self._order), 0, None), (1.7, next(self._order), 1, None)]

    @property
    def truth(self):
        """Seconds by which the second clock is ahead of the first."""
        return self.ends[1].wall() - self.ends[0].wall()

    def go_on(self, seconds):
        until = self.now + seconds
        while self._events[0][0] <= until:
            self.now, _, number, beat = heapq.heappop(self._events)
            if beat is not None:
                self.ends[number].peer.on_heartbeat(beat, self.ends[number].now)
                continue
            late = self.delays[number] + self._chance.expovariate(1 / self.jitter) if self.jitter else 0.0
            arrives = self.now + self.delays[number] + late
            heartbeat = self.ends[number].peer.build_heartbeat(self.ends[number].now)
            heapq.heappush(self._events, (arrives, next(self._order), 1 - number, heartbeat))
            heapq.heappush(self._events, (self.now + EVERY, next(self._order), number, None))
        self.now = until

    def check(self, most):
        """Check both measured offsets: the error is below the stated one, and that below ``most``."""
        for number, sign in ((0, 1), (1, -1)):
            offset = self.ends[number].offset
            assert abs(offset.offset_s - sign * self.truth) <= offset.error_s + 1e-6
            assert offset.error_s < most


@pytest.mark.parametrize("ahead", [0.0, 0.003, -7.5, 86400.0])
@pytest.mark.parametrize(("there", "back"), [(1e-4, 1e-4), (0.03, 0.03), (0.001, 0.08), (5.0, 1.0)])
def test_both_sides_know_the_clock_offset_after_two_heartbeats(ahead, there, back):
    world = World(ahead, there=there, back=back)
    world.go_on(0.5)
    assert world.ends[1].offset is UNKNOWN or there > 0.1
    world.go_on(2 * EVERY + 2 * (there + back))
    world.check((there + back) / 2 + 3e-4)


def test_the_shortest_round_trip_counts():
    world = World(1.0, there=0.0002, back=0.0002, jitter=0.05)
    world.go_on(EVERY * 40)
    world.check(0.02)


def test_clocks_that_part_are_known_less_well_as_time_goes_by():
    world = World(1.0, drift=MAX_DRIFT * 0.9)
    world.go_on(100)
    world.check(0.001)
    early = world.ends[0].offset.error_s
    world.delays = (10.0, 10.0)
    world.go_on(45)
    world.check(0.01)
    assert world.ends[0].offset.error_s > early + 20 * MAX_DRIFT


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("step", [-3600.0, -0.01, 0.002, 30.0])
def test_a_clock_that_is_set(which, step):
    """It may be set at any moment, while heartbeats are on their way or held."""
    for phase in range(20):
        world = World(0.5)
        world.go_on(60 + phase * EVERY / 20)
        world.ends[which].ahead += step
        world.go_on(2 * EVERY + 0.01)
        world.check(0.001)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("seconds", [1.0, 5000.0])
def test_a_machine_whose_clocks_stood_still(which, seconds):
    """A virtual machine was stopped and continued: earlier measurements are discarded."""
    for phase in range(20):
        world = World(0.5)
        world.go_on(60 + phase * EVERY / 20)
        world.ends[which].asleep += seconds
        world.ends[which].ahead -= seconds
        world.go_on(3 * EVERY + 0.01)
        world.check(0.001)


@pytest.mark.parametrize("beat", [
    HeartbeatMessage(0.0), HeartbeatMessage(1e11, 1e11, 604800.0), HeartbeatMessage(5.0, 1.79e9, 0.0),
    HeartbeatMessage(5.0, 0.0, 1e-9), HeartbeatMessage(5.0, None, 3.0),
])  # fmt: skip
def test_a_reply_without_a_time_is_ignored(beat):
    peer = PeerClock()
    peer.build_heartbeat()
    peer.on_heartbeat(beat)
    assert peer.best_offset() is UNKNOWN


def test_a_reply_from_before_the_request_is_ignored():
    peer = PeerClock()
    ours = peer.build_heartbeat()
    peer.on_heartbeat(HeartbeatMessage(5.0, ours.clock, 1.0))
    assert peer.best_offset() is UNKNOWN
    peer.on_heartbeat(HeartbeatMessage(5.0, ours.clock, 0.0))
    assert peer.best_offset() is not UNKNOWN


def test_the_steady_clock_goes_on():
    assert 0 < boottime() <= boottime()
