"""Where the time of a run went: each moment from the launcher's start on is counted to one part. Pure.

The parts add up to the wall time. Torch is seen to work from the first collective on; a program without collectives
works from the start of its last rank on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.output import events
from ddplaunch.output.events import AttemptStarted, Event
from ddplaunch.words import format_count, format_duration

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, NonNegativeFloat

MIN_SHOWN_FRACTION = 0.01  # of the wall time: a smaller part is not worth a word


class TimeCategory(Enum):
    """What a moment counts as; the value is its field of ``TimeBreakdown``."""

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


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds of each part, and how often the job was started again."""

    queued: NonNegativeFloat = 0.0  # of a submitted job: no run of it was there
    waiting: NonNegativeFloat = 0.0  # for the other nodes, before the first attempt
    imports: NonNegativeFloat = 0.0  # from the first plan until all ranks had a process
    first_collective: NonNegativeFloat = 0.0  # from then until every rank had entered a collective
    steady: NonNegativeFloat = 0.0  # the ranks worked, and it was not in vain
    stalled: NonNegativeFloat = 0.0  # the ranks got nowhere
    straggler: NonNegativeFloat = 0.0  # some ranks were done, the others were not
    stopping: NonNegativeFloat = 0.0  # from the first failure, signal or warning until nothing was left
    restarting: NonNegativeFloat = 0.0  # from then until all ranks had a process again
    discarded: NonNegativeFloat = 0.0  # the ranks worked, but after the last checkpoint of an attempt that failed
    restarts: Count = 0

    @property
    def wall_s(self) -> float:
        """Seconds in all."""
        return sum((float(getattr(self, part.value)) for part in TimeCategory), 0.0)

    @property
    def goodput(self) -> float | None:
        """The effective part of the wall time; None of no time."""
        return self.steady / self.wall_s if self.wall_s > 0 else None

    def add(self, other: TimeBreakdown) -> TimeBreakdown:
        return TimeBreakdown(*(getattr(self, name) + getattr(other, name) for name in TimeBreakdown.__match_args__))

    @property
    def lost_times(self) -> list[tuple[float, str]]:
        """All that was not effective: seconds, and what they were, the most first."""
        words = {**_CATEGORY_NAMES, TimeCategory.RESTARTING: f"in {format_count(self.restarts, 'restart')}"}
        found = [(getattr(self, part.value), text) for part, text in words.items()]
        return sorted((each for each in found if each[0] > 0), reverse=True)


_CATEGORY_NAMES: Mapping[TimeCategory, str] = {
    TimeCategory.QUEUED: "queued",
    TimeCategory.WAITING: "waiting for nodes",
    TimeCategory.IMPORTS: "starting",
    TimeCategory.FIRST_COLLECTIVE: "until the first collective",
    TimeCategory.STALLED: "stalled",
    TimeCategory.STRAGGLER: "waiting for a straggler",
    TimeCategory.STOPPING: "stopping",
    TimeCategory.RESTARTING: "",
    TimeCategory.DISCARDED: "of work after the last checkpoint",
}


def format_goodput(spent: TimeBreakdown) -> str | None:
    """The effective time in a line; None of no time."""
    if spent.goodput is None:
        return None
    worth = [
        f"{format_duration(seconds)} {text}"
        for seconds, text in spent.lost_times
        if seconds >= MIN_SHOWN_FRACTION * spent.wall_s
    ]
    lost = f"; lost: {', '.join(worth)}" if worth else ""
    return f"effective {format_percent(spent.goodput)}: {format_duration(spent.steady)} of {format_duration(spent.wall_s)}{lost}"


def format_percent(share: float | None) -> str:
    """A share of the time, rounded down: "91 %"."""
    return "-" if share is None else f"{int(100 * share)} %"


def sum_breakdowns(parts: Iterable[TimeBreakdown]) -> TimeBreakdown:
    whole = TimeBreakdown()
    for each in parts:
        whole = whole.add(each)
    return whole


_RUNNING_CATEGORIES = (TimeCategory.STEADY, TimeCategory.STALLED, TimeCategory.STRAGGLER)


class TimeAccounting:
    """The stretches of one run's time, one after the other, as they come."""

    def __init__(self, began: float, nnodes: int) -> None:
        self._stretches: list[tuple[TimeCategory, float, float]] = []
        self._part = TimeCategory.WAITING if nnodes > 1 else TimeCategory.IMPORTS  # now
        self._since = began
        self._number, self._attempt, self._awaited = 0, began, 0  # since when it is; ranks without a process yet
        self._together = False  # whether the ranks wait for one another
        self._checkpoint: float | None = None  # since when the last is; -inf where there is none, None if nobody looked
        self._restarts = 0
        self._over = False

    def breakdown(self, now: float | None = None) -> TimeBreakdown:
        """The time until ``now``, or until the last event."""
        if now is not None and not self._over:
            self._switch_to(self._part, now)
        seconds = dict.fromkeys(TimeCategory, 0.0)
        for part, begin, end in self._stretches:
            seconds[part] += end - begin
        return replace(TimeBreakdown(*(seconds[part] for part in TimeCategory)), restarts=self._restarts)  # type: ignore[arg-type]

    @property
    def stall_periods(self) -> tuple[tuple[float, float], ...]:
        """When the ranks got nowhere."""
        return tuple((begin, end) for part, begin, end in self._stretches if part is TimeCategory.STALLED)

    def on_event(self, event: Event | AttemptStarted | events.AttemptsOmitted, moment: float) -> None:
        if isinstance(event, events.AttemptsOmitted):  # it is written at the end of the attempt that stands after it
            self._restarts += event.attempts
            return
        if self._over:
            return
        moment = max(moment, self._since)  # a clock may have been set back
        self._switch_to(self._part, moment)
        match AttemptStarted.of(event) if isinstance(event, events.AttemptPlanned) else event:
            case AttemptStarted(attempt=number, ranks=ranks):
                self._number, self._attempt, self._awaited = number, moment, len(ranks)
                self._together, self._checkpoint = False, None
                self._switch_to(TimeCategory.RESTARTING if self._restarts else TimeCategory.IMPORTS, moment)
            case events.RankStarted():
                self._awaited -= 1
                if self._awaited == 0 and self._part in (TimeCategory.IMPORTS, TimeCategory.RESTARTING):
                    self._switch_to(TimeCategory.STEADY, moment)
            case events.FirstCollective(moment=entered):
                self._together = True
                self._reclassify(TimeCategory.FIRST_COLLECTIVE, self._attempt, entered)
            case events.JobStalled(since=since) if self._part in _RUNNING_CATEGORIES:
                self._together = True
                self._reclassify(TimeCategory.STALLED, max(since, self._attempt), moment)
                self._switch_to(TimeCategory.STALLED, moment)
            case events.StallEnded() if self._part is TimeCategory.STALLED:
                self._switch_to(TimeCategory.STEADY, moment)
            case events.RankExited(code=0) if self._part in _RUNNING_CATEGORIES and self._together:
                self._switch_to(TimeCategory.STRAGGLER, moment)
            case events.RankExited(code=code, attempt=number) if code and number == self._number:
                self._stop(moment)
            case events.RankStartFailed() | events.SignalReceived() | events.JobPreempted():
                self._stop(moment)
            case events.CheckpointFound(moment=saved):
                self._checkpoint = -inf if saved is None else saved
            case events.Restarting():
                self._discard(moment)
                self._restarts += 1
                self._switch_to(TimeCategory.RESTARTING, moment)
            case events.JobEnded(code=code):
                if code:
                    self._discard(moment)
                self._over = True

    def _switch_to(self, part: TimeCategory, moment: float) -> None:
        """From ``moment`` on it is ``part``."""
        if moment > self._since:
            begin = self._since
            if self._stretches and self._stretches[-1][::2] == (self._part, begin):  # somebody asked in between
                begin = self._stretches.pop()[1]
            self._stretches.append((self._part, begin, moment))
        self._part, self._since = part, max(moment, self._since)

    def _stop(self, moment: float) -> None:
        self._switch_to(TimeCategory.STOPPING, moment)

    def _reclassify(self, part: TimeCategory, begin: float, end: float) -> None:
        """What was steady between these moments was ``part``."""
        found: list[tuple[TimeCategory, float, float]] = []
        for each in self._stretches:
            first, last = max(begin, each[1]), min(end, each[2])
            if each[0] is not TimeCategory.STEADY or first >= last:
                found.append(each)
                continue
            cut = (TimeCategory.STEADY, each[1], first), (part, first, last), (TimeCategory.STEADY, last, each[2])
            found += (one for one in cut if one[1] < one[2])
        self._stretches = found

    def _discard(self, moment: float) -> None:
        """The attempt failed: what was done since its last checkpoint is lost, where it is known which that is."""
        if self._checkpoint is not None:
            self._reclassify(TimeCategory.DISCARDED, max(self._checkpoint, self._attempt), moment)
