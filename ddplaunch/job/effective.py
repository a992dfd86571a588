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
from ddplaunch.output.events import Begun, Event
from ddplaunch.words import counted, duration

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Amount, Count

LEAST = 0.01  # of the wall time: a smaller part is not worth a word


class Part(Enum):
    """What a moment counts as; the value is its field of ``Spent``."""

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
class Spent:
    """Seconds of each part, and how often the job was started again."""

    queued: Amount = 0.0  # of a submitted job: no run of it was there
    waiting: Amount = 0.0  # for the other nodes, before the first attempt
    imports: Amount = 0.0  # from the first plan until all ranks had a process
    first_collective: Amount = 0.0  # from then until every rank had entered a collective
    steady: Amount = 0.0  # the ranks worked, and it was not in vain
    stalled: Amount = 0.0  # the ranks got nowhere
    straggler: Amount = 0.0  # some ranks were done, the others were not
    stopping: Amount = 0.0  # from the first failure, signal or warning until nothing was left
    restarting: Amount = 0.0  # from then until all ranks had a process again
    discarded: Amount = 0.0  # the ranks worked, but after the last checkpoint of an attempt that failed
    restarts: Count = 0

    @property
    def wall(self) -> float:
        """Seconds in all."""
        return sum((float(getattr(self, part.value)) for part in Part), 0.0)

    @property
    def share(self) -> float | None:
        """The effective part of the wall time; None of no time."""
        return self.steady / self.wall if self.wall > 0 else None

    def plus(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, name) + getattr(other, name) for name in Spent.__match_args__))

    @property
    def lost(self) -> list[tuple[float, str]]:
        """All that was not effective: seconds, and what they were, the most first."""
        words = {**_WORDS, Part.RESTARTING: f"in {counted(self.restarts, 'restart')}"}
        found = [(getattr(self, part.value), text) for part, text in words.items()]
        return sorted((each for each in found if each[0] > 0), reverse=True)


_WORDS: Mapping[Part, str] = {
    Part.QUEUED: "queued",
    Part.WAITING: "waiting for nodes",
    Part.IMPORTS: "starting",
    Part.FIRST_COLLECTIVE: "until the first collective",
    Part.STALLED: "stalled",
    Part.STRAGGLER: "waiting for a straggler",
    Part.STOPPING: "stopping",
    Part.RESTARTING: "",
    Part.DISCARDED: "of work after the last checkpoint",
}


def told(spent: Spent) -> str | None:
    """The effective time in a line; None of no time."""
    if spent.share is None:
        return None
    worth = [f"{duration(seconds)} {text}" for seconds, text in spent.lost if seconds >= LEAST * spent.wall]
    lost = f"; lost: {', '.join(worth)}" if worth else ""
    return f"effective {percent(spent.share)}: {duration(spent.steady)} of {duration(spent.wall)}{lost}"


def percent(share: float | None) -> str:
    """A share of the time, rounded down: "91 %"."""
    return "-" if share is None else f"{int(100 * share)} %"


def total(parts: Iterable[Spent]) -> Spent:
    whole = Spent()
    for each in parts:
        whole = whole.plus(each)
    return whole


_WORKING = (Part.STEADY, Part.STALLED, Part.STRAGGLER)


class Account:
    """The stretches of one run's time, one after the other, as they come."""

    def __init__(self, began: float, nnodes: int) -> None:
        self._stretches: list[tuple[Part, float, float]] = []
        self._part = Part.WAITING if nnodes > 1 else Part.IMPORTS  # now
        self._since = began
        self._number, self._attempt, self._awaited = 0, began, 0  # since when it is; ranks without a process yet
        self._together = False  # whether the ranks wait for one another
        self._checkpoint: float | None = None  # since when the last is; -inf where there is none, None if nobody looked
        self._restarts = 0
        self._over = False

    def spent(self, now: float | None = None) -> Spent:
        """The time until ``now``, or until the last event."""
        if now is not None and not self._over:
            self._turn(self._part, now)
        seconds = dict.fromkeys(Part, 0.0)
        for part, begin, end in self._stretches:
            seconds[part] += end - begin
        return replace(Spent(*(seconds[part] for part in Part)), restarts=self._restarts)  # type: ignore[arg-type]

    @property
    def stalls(self) -> tuple[tuple[float, float], ...]:
        """When the ranks got nowhere."""
        return tuple((begin, end) for part, begin, end in self._stretches if part is Part.STALLED)

    def take(self, event: Event | Begun | events.LeftOut, moment: float) -> None:
        if isinstance(event, events.LeftOut):  # it is written at the end of the attempt that stands after it
            self._restarts += event.attempts
            return
        if self._over:
            return
        moment = max(moment, self._since)  # a clock may have been set back
        self._turn(self._part, moment)
        match Begun.of(event) if isinstance(event, events.Planned) else event:
            case Begun(attempt=number, ranks=ranks):
                self._number, self._attempt, self._awaited = number, moment, len(ranks)
                self._together, self._checkpoint = False, None
                self._turn(Part.RESTARTING if self._restarts else Part.IMPORTS, moment)
            case events.Started():
                self._awaited -= 1
                if self._awaited == 0 and self._part in (Part.IMPORTS, Part.RESTARTING):
                    self._turn(Part.STEADY, moment)
            case events.FirstCollective(moment=entered):
                self._together = True
                self._recount(Part.FIRST_COLLECTIVE, self._attempt, entered)
            case events.Stalled(since=since) if self._part in _WORKING:
                self._together = True
                self._recount(Part.STALLED, max(since, self._attempt), moment)
                self._turn(Part.STALLED, moment)
            case events.WentOn() if self._part is Part.STALLED:
                self._turn(Part.STEADY, moment)
            case events.Exited(code=0) if self._part in _WORKING and self._together:
                self._turn(Part.STRAGGLER, moment)
            case events.Exited(code=code, attempt=number) if code and number == self._number:
                self._stop(moment)
            case events.FailedToStart() | events.Signalled() | events.Preempted():
                self._stop(moment)
            case events.LastCheckpoint(moment=saved):
                self._checkpoint = -inf if saved is None else saved
            case events.Restarting():
                self._discard(moment)
                self._restarts += 1
                self._turn(Part.RESTARTING, moment)
            case events.Ended(code=code):
                if code:
                    self._discard(moment)
                self._over = True

    def _turn(self, part: Part, moment: float) -> None:
        """From ``moment`` on it is ``part``."""
        if moment > self._since:
            begin = self._since
            if self._stretches and self._stretches[-1][::2] == (self._part, begin):  # somebody asked in between
                begin = self._stretches.pop()[1]
            self._stretches.append((self._part, begin, moment))
        self._part, self._since = part, max(moment, self._since)

    def _stop(self, moment: float) -> None:
        self._turn(Part.STOPPING, moment)

    def _recount(self, part: Part, begin: float, end: float) -> None:
        """What was steady between these moments was ``part``."""
        found: list[tuple[Part, float, float]] = []
        for each in self._stretches:
            first, last = max(begin, each[1]), min(end, each[2])
            if each[0] is not Part.STEADY or first >= last:
                found.append(each)
                continue
            cut = (Part.STEADY, each[1], first), (part, first, last), (Part.STEADY, last, each[2])
            found += (one for one in cut if one[1] < one[2])
        self._stretches = found

    def _discard(self, moment: float) -> None:
        """The attempt failed: what was done since its last checkpoint is lost, where it is known which that is."""
        if self._checkpoint is not None:
            self._recount(Part.DISCARDED, max(self._checkpoint, self._attempt), moment)
