"""Estimates the offset of a peer's clock from heartbeats, as NTP does.

A heartbeat has its sender's time, the time in the last heartbeat that the sender received, and how long ago that was.
The round trip is the time since that last heartbeat was sent, less this delay. The peer's clock is taken as read in the
middle of the round trip, so the error is at most half of it.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.core.messages import HeartbeatMessage

MAX_UNANSWERED = 16  # own heartbeats that the peer has not answered yet
MAX_DRIFT = 15e-6  # seconds per second that two clocks may diverge (NTP's PHI)
MIN_CLOCK_DIFFERENCE_S = 0.1  # where no round trip was measured, smaller differences are ignored
MAX_REPLY_AGE_S = 3600.0  # a received heartbeat is not answered later than this


class ClockOffset(Struct, frozen=True):
    """How many seconds a peer's clock is ahead of the local one, and the largest possible error."""

    offset_s: float
    error_s: float


LOCAL_CLOCK = ClockOffset(0.0, 0.0)
UNKNOWN = ClockOffset(0.0, math.inf)


class _OffsetMeasurement(Struct, frozen=True):
    """The clock offset from one heartbeat and its reply; its error grows with time, so that a newer sample wins."""

    ahead: float
    error: float  # at ``taken``
    taken: float

    def error_at(self, now: float) -> float:
        return self.error + MAX_DRIFT * (now - self.taken)

    def is_consistent_with(self, later: _OffsetMeasurement) -> bool:
        return abs(self.ahead - later.ahead) <= self.error_at(later.taken) + later.error


def to_local_time(moment: float, clock: float, now: float) -> float:
    """Convert a time of another machine's clock, which shows ``clock`` now; the transmission time is neglected."""
    off = now - clock
    return moment + off if abs(off) > MIN_CLOCK_DIFFERENCE_S else moment


def boottime() -> float:
    """A monotonic clock; it also counts while the machine is suspended (CLOCK_BOOTTIME) where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ClockReading(NamedTuple):
    """The local clocks at one moment."""

    wall: float  # seconds since the epoch
    boottime: float


def read_clocks() -> ClockReading:
    return ClockReading(time.time(), boottime())


class PeerClock:
    """The clock offset of one peer, from heartbeats in both directions. Methods without ``now`` read the clocks."""

    def __init__(self) -> None:
        self._sent: dict[float, float] = {}  # monotonic time of own heartbeats, by the wall-clock time in them
        self._last_received: tuple[float, float] | None = None  # time in the peer's last heartbeat, and of its arrival
        self._best: _OffsetMeasurement | None = None

    def build_heartbeat(self, now: ClockReading | None = None) -> HeartbeatMessage:
        """Build the heartbeat to send now."""
        clock, moment = now or read_clocks()
        self._sent[clock] = moment
        if len(self._sent) > MAX_UNANSWERED:
            del self._sent[next(iter(self._sent))]
        if self._last_received is None or not 0 <= moment - self._last_received[1] <= MAX_REPLY_AGE_S:
            return HeartbeatMessage(clock)
        return HeartbeatMessage(clock, self._last_received[0], moment - self._last_received[1])

    def on_heartbeat(self, heartbeat: HeartbeatMessage, now: ClockReading | None = None) -> None:
        """Measure the offset by a peer's heartbeat, if it replies to a local one and the round trip is not negative."""
        clock, moment = now or read_clocks()
        self._last_received = heartbeat.clock, moment
        sent_at = None if heartbeat.last_received is None else self._sent.get(heartbeat.last_received)
        if sent_at is None or (round_trip := moment - sent_at - heartbeat.held_s) < 0:
            return
        error = round_trip / 2 + MAX_DRIFT * heartbeat.held_s
        sample, best = _OffsetMeasurement(heartbeat.clock + round_trip / 2 - clock, error, moment), self._best
        # An inconsistent sample: a clock was set or stopped, so the earlier offset is wrong.
        if best is None or sample.error <= best.error_at(moment) or not best.is_consistent_with(sample):
            self._best = sample

    def best_offset(self, now: ClockReading | None = None) -> ClockOffset:
        """The best known offset; UNKNOWN before about the second heartbeat."""
        moment = (now or read_clocks()).boottime
        return ClockOffset(self._best.ahead, self._best.error_at(moment)) if self._best else UNKNOWN
