"""The time breakdown of a run: each moment from the launcher's start is put into one category. Pure.

The categories add up to the wall time; goodput is the share of it that was steady work and was not lost. Ranks count
as working from the first collective on; in a program without collectives, from the start of the last rank on.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.types import Count, NonNegativeFloat
from ddplaunch.core import events
from ddplaunch.core.events import AttemptStarted, Event


class TimeCategory(Enum):
    """What a moment of a run was used for; each value is the name of a field of ``TimeBreakdown``."""

    QUEUED = "queued"
    WAITING = "waiting"
    IMPORTS = "imports"
    FIRST_COLLECTIVE = "first_collective"
    STEADY = "steady"
    STALLED = "stalled"
    STRAGGLER = "straggler"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    DISCARDED = "discarded"


class TimeBreakdown(Struct, frozen=True):
    """Seconds in each category, and the number of restarts."""

    queued: NonNegativeFloat = 0.0  # of a submitted job, before its first run and between two runs
    waiting: NonNegativeFloat = 0.0  # for the other nodes, before the first attempt
    imports: NonNegativeFloat = 0.0  # from the first plan until all ranks had a process
    first_collective: NonNegativeFloat = 0.0  # after that, until every rank had entered a collective
    steady: NonNegativeFloat = 0.0  # the ranks worked, and the work was not lost
    stalled: NonNegativeFloat = 0.0  # the ranks made no progress
    straggler: NonNegativeFloat = 0.0  # some ranks had ended, others still ran
    stopping: NonNegativeFloat = 0.0  # from the first failure, signal or preemption until no process was left
    restarting: NonNegativeFloat = 0.0  # after that, until all ranks had a process again
    discarded: NonNegativeFloat = 0.0  # lost work: after the last checkpoint of an attempt that failed
    restarts: Count = 0

    @property
    def wall_s(self) -> float:
        """The total, in seconds."""
        return sum((float(getattr(self, part.value)) for part in TimeCategory), 0.0)

    @property
    def goodput(self) -> float | None:
        """The effective part of the wall time, 0 to 1; None if the wall time is 0."""
        return self.steady / self.wall_s if self.wall_s > 0 else None


_RUNNING_CATEGORIES = (TimeCategory.STEADY, TimeCategory.STALLED, TimeCategory.STRAGGLER)


class TimeAccounting:
    """Builds the time breakdown of one run from its events, as they come."""

    def __init__(self, began: float, nnodes: int) -> None:
        self._periods: list[tuple[TimeCategory, float, float]] = []
        self._category = TimeCategory.WAITING if nnodes > 1 else TimeCategory.IMPORTS  # now
        self._since = began
        self._attempt, self._attempt_began, self._starting = 0, began, 0  # the last: ranks without a process yet
        self._uses_collectives = False  # without any, ranks do not wait for one another
        self._checkpoint_at: float | None = None  # the last; -inf where there is none, None where it is unknown
        self._restarts = 0
        self._has_ended = False

    def breakdown(self, now: float | None = None) -> TimeBreakdown:
        """Return the breakdown of the time until ``now``, or until the last event."""
        if now is not None and not self._has_ended:
            self._switch_to(self._category, now)
        seconds = dict.fromkeys(TimeCategory, 0.0)
        for part, begin, end in self._periods:
            seconds[part] += end - begin
        return replace(TimeBreakdown(*(seconds[part] for part in TimeCategory)), restarts=self._restarts)  # type: ignore[arg-type]

    @property
    def stall_periods(self) -> tuple[tuple[float, float], ...]:
        """Begin and end of each period in which the ranks were stalled."""
        return tuple((begin, end) for part, begin, end in self._periods if part is TimeCategory.STALLED)

    def on_event(self, event: Event | AttemptStarted | events.AttemptsOmitted, moment: float) -> None:
        if isinstance(event, events.AttemptsOmitted):  # it is written at the end of the attempt that follows them
            self._restarts += event.attempts
            return
        if self._has_ended:
            return
        moment = max(moment, self._since)  # a clock may have been set back
        self._switch_to(self._category, moment)
        match AttemptStarted.from_planned(event) if isinstance(event, events.AttemptPlanned) else event:
            case AttemptStarted(attempt=number, ranks=ranks):
                self._attempt, self._attempt_began, self._starting = number, moment, len(ranks)
                self._uses_collectives, self._checkpoint_at = False, None
                self._switch_to(TimeCategory.RESTARTING if self._restarts else TimeCategory.IMPORTS, moment)
            case events.RankStarted():
                self._starting -= 1
                if self._starting == 0 and self._category in (TimeCategory.IMPORTS, TimeCategory.RESTARTING):
                    self._switch_to(TimeCategory.STEADY, moment)
            case events.FirstCollective(moment=entered):
                self._uses_collectives = True
                self._reclassify(TimeCategory.FIRST_COLLECTIVE, self._attempt_began, entered)
            case events.JobStalled(since=since) if self._category in _RUNNING_CATEGORIES:
                self._uses_collectives = True
                self._reclassify(TimeCategory.STALLED, max(since, self._attempt_began), moment)
                self._switch_to(TimeCategory.STALLED, moment)
            case events.StallEnded() if self._category is TimeCategory.STALLED:
                self._switch_to(TimeCategory.STEADY, moment)
            case events.RankExited(code=0) if self._category in _RUNNING_CATEGORIES and self._uses_collectives:
                self._switch_to(TimeCategory.STRAGGLER, moment)
            case events.RankExited(code=code, attempt=number) if code and number == self._attempt:
                self._stop(moment)
            case events.RankStartFailed() | events.SignalReceived() | events.JobPreempted():
                self._stop(moment)
            case events.CheckpointFound(moment=saved):
                self._checkpoint_at = -inf if saved is None else saved
            case events.Restarting():
                self._discard_lost_work(moment)
                self._restarts += 1
                self._switch_to(TimeCategory.RESTARTING, moment)
            case events.JobEnded(code=code):
                if code:
                    self._discard_lost_work(moment)
                self._has_ended = True

    def _switch_to(self, part: TimeCategory, moment: float) -> None:
        """End the current period at ``moment`` and begin one of category ``part``."""
        if moment > self._since:
            begin = self._since
            if self._periods and self._periods[-1][::2] == (self._category, begin):  # split by breakdown()
                begin = self._periods.pop()[1]
            self._periods.append((self._category, begin, moment))
        self._category, self._since = part, max(moment, self._since)

    def _stop(self, moment: float) -> None:
        self._switch_to(TimeCategory.STOPPING, moment)

    def _reclassify(self, part: TimeCategory, begin: float, end: float) -> None:
        """Change category STEADY to ``part`` between ``begin`` and ``end``."""
        periods: list[tuple[TimeCategory, float, float]] = []
        for period in self._periods:
            first, last = max(begin, period[1]), min(end, period[2])
            if period[0] is not TimeCategory.STEADY or first >= last:
                periods.append(period)
                continue
            cut = (TimeCategory.STEADY, period[1], first), (part, first, last), (TimeCategory.STEADY, last, period[2])
            periods += (one for one in cut if one[1] < one[2])
        self._periods = periods

    def _discard_lost_work(self, moment: float) -> None:
        """Count the work of a failed attempt since its last checkpoint, if that is known, as discarded."""
        if self._checkpoint_at is not None:
            self._reclassify(TimeCategory.DISCARDED, max(self._checkpoint_at, self._attempt_began), moment)
