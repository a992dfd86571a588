"""How far the clock of a peer is ahead of ours, by heartbeats: NTP's reckoning, with beats that cross.

A beat says what its sender's clock shows, and which clock of ours it heard last and how long ago. What is left of the
time since we sent that is a round trip; the peer's clock was read in the middle of it, give or take a half.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ddplaunch.control.messages import HeartbeatMessage
from ddplaunch.dataclass import dataclass

MAX_UNANSWERED = 16  # beats of ours that the peer may not have answered yet
MAX_DRIFT = 15e-6  # seconds a second by which two clocks may part (NTP's PHI)
MAX_REPLY_AGE_S = 3600.0  # seconds for which a beat that was heard may be answered


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which a peer's clock is ahead of ours, and by which that may be wrong, either way."""

    offset_s: float
    error_s: float


LOCAL_CLOCK = ClockOffset(0.0, 0.0)
UNKNOWN = ClockOffset(0.0, math.inf)


@dataclass(frozen=True)
class _Sample:
    """A round trip; a better one takes its place, and so does in time one that is as good."""

    ahead: float
    error: float  # when it was taken
    taken: float

    def error_at(self, now: float) -> float:
        return self.error + MAX_DRIFT * (now - self.taken)

    def is_consistent_with(self, later: _Sample) -> bool:
        return abs(self.ahead - later.ahead) <= self.error_at(later.taken) + later.error


def boottime() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class PeerClock:
    """What the beats from and to one peer tell of its clock."""

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, monotonic_clock: Callable[[], float] = boottime
    ) -> None:
        self._wall, self._steady = wall_clock, monotonic_clock
        self._sent: dict[float, float] = {}  # when a beat of ours left, by our clock in it
        self._heard: tuple[float, float] | None = None  # the peer's in its last one, and when it came
        self._best: _Sample | None = None

    def next_heartbeat(self) -> HeartbeatMessage:
        """The beat to be sent now."""
        clock, now = self._wall(), self._steady()
        self._sent[clock] = now
        if len(self._sent) > MAX_UNANSWERED:
            del self._sent[next(iter(self._sent))]
        if self._heard is None or not 0 <= now - self._heard[1] <= MAX_REPLY_AGE_S:
            return HeartbeatMessage(clock)
        return HeartbeatMessage(clock, self._heard[0], now - self._heard[1])

    def on_heartbeat(self, beat: HeartbeatMessage) -> None:
        """A beat has come; one that answers none of ours, or before it left, tells nothing."""
        clock, now = self._wall(), self._steady()
        self._heard = beat.clock, now
        left = None if beat.last_received is None else self._sent.get(beat.last_received)
        if left is None or (trip := now - left - beat.held_s) < 0:
            return
        sample = _Sample(beat.clock + trip / 2 - clock, trip / 2 + MAX_DRIFT * beat.held_s, now)
        best = self._best
        # One that disagrees: a clock was set, or stood still, and what was known before is wrong.
        if best is None or sample.error <= best.error_at(now) or not best.is_consistent_with(sample):
            self._best = sample

    def best_offset(self) -> ClockOffset:
        """The best that is known: nothing before the second beat, about."""
        now = self._steady()
        return ClockOffset(self._best.ahead, self._best.error_at(now)) if self._best else UNKNOWN
