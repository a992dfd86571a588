"""Who is slow: which rank arrives last at collectives, how often, by how much, and what the others' wait for it costs.

A rank is late by the time for which at least half of the others had been there, less what it waited itself in other
process groups meanwhile. It is slow where the others wait for it much longer than for the next, again and again.
Times of different hosts are compared as well as their clocks are known, and no better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from ddplaunch import words
from ddplaunch.dataclass import dataclass
from ddplaunch.diagnosis.inspection import CollectiveArrivals

MIN_COLLECTIVES = 10  # collectives that say nothing yet
MIN_LATENESS_S = 1e-4  # seconds by which ranks of one host differ without any reason
MIN_COST_FRACTION = 0.02  # share of the time that is worth a word
OUTLIER_FACTOR = 3.0  # times what the next rank costs
COMPARABLE_COST_RATIO = 0.2  # of what the slowest rank costs: what one costs that is slow, too
MIN_TIMES_LAST = 5  # times that a rank was last, to be a slow one
IGNORED_OUTLIERS = 2  # its longest waits, which do not make it one
MAX_SENTENCES = 3


class RankClock(NamedTuple):
    """What is known of the clock by which a rank's arrivals are told."""

    node: int
    offset_s: float = 0.0  # seconds, of the clock that others are compared with
    error_s: float = 0.0  # seconds by which ``offset_s`` may be wrong either way; infinite where nothing is known


@dataclass(frozen=True)
class RankLateness:
    """How one rank kept up with the others of a process group."""

    rank: int
    times_last: int  # how many times it arrived last, and was late
    lateness: float  # seconds, the median of those times
    waited_fraction: float  # share of the whole time in which the others waited for it
    usual_fraction: float  # the same without the longest waits
    excused_fraction: float  # share of the whole time by which it was late because it waited in another group

    @property
    def blamed_fraction(self) -> float:
        """What it may be blamed for: its habit, where that is more than what others brought about."""
        return self.usual_fraction if self.usual_fraction > self.excused_fraction else 0.0


@dataclass(frozen=True)
class GroupLateness:
    """How the ranks of one process group kept up with each other."""

    group: str
    description: str
    collectives: int  # that were compared
    seconds: float  # from the first to the last of them
    ranks: tuple[RankLateness, ...]  # in order
    unclear_fraction: (
        float  # share of the time lost to a rank that the clocks cannot tell; infinite where none was compared
    )
    error: float  # seconds by which the clocks may be wrong, where that made it unclear

    @property
    def slow_ranks(self) -> tuple[RankLateness, ...]:
        """The ranks that are slower than the others, the slowest first; none in a balanced job."""
        order = sorted(self.ranks, key=lambda each: -each.blamed_fraction)
        found = 0
        for count, (this, following) in enumerate(pairwise(order[: (len(order) + 3) // 2]), 1):
            if (
                this.times_last < MIN_TIMES_LAST
                or this.blamed_fraction < COMPARABLE_COST_RATIO * order[0].blamed_fraction
            ):
                break
            if this.blamed_fraction > OUTLIER_FACTOR * following.blamed_fraction:
                found = count
        slow = tuple(order[:found])
        return slow if sum(each.blamed_fraction for each in slow) >= MIN_COST_FRACTION else ()


def measure_lateness(
    arrivals: Iterable[CollectiveArrivals], clocks: Mapping[int, RankClock] | None = None
) -> tuple[GroupLateness, ...]:
    """Compare the ranks in each process group that two of them are in; ``clocks`` by rank, one clock where not given.

    Only collectives count at which more than half of a group's ranks were seen. A group with few of them is left out.
    """
    known = _ClockTable(clocks or {})
    groups: dict[str, _GroupArrivals] = {}
    for each in arrivals:
        group = groups.setdefault(each.group, _GroupArrivals(each.description))
        group.ranks.add(each.rank)
        ahead = known[each.rank].offset_s
        for number, seconds in each:
            group.arrived[number].append((seconds - ahead, each.rank))
    counted = {name: group for name, group in groups.items() if group.keep_comparable()}
    excuses = _WaitsElsewhere(counted)
    return tuple(_group_lateness(name, group, known, excuses) for name, group in counted.items())


def mean_lateness(groups: Iterable[GroupLateness]) -> dict[int, float]:
    """By how many seconds each rank comes after the others, in the mean of the collectives that were compared."""
    found: dict[int, float] = {}
    for group in groups:
        for each in group.ranks:
            mean = each.lateness * each.times_last / group.collectives
            found[each.rank] = max(mean, found.get(each.rank, 0.0))
    return found


class _ClockTable(dict[int, RankClock]):
    def __missing__(self, rank: int) -> RankClock:
        return RankClock(0)

    def error(self, rank: int, other: int) -> float:
        """By how many seconds the time between arrivals of two ranks may be wrong."""
        one, two = self[rank], self[other]
        return 0.0 if one.node == two.node else one.error_s + two.error_s


class _GroupArrivals:
    """The arrivals at a group's collectives."""

    def __init__(self, description: str) -> None:
        self.description = description
        self.ranks: set[int] = set()
        self.arrived: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # by number; then in time

    def keep_comparable(self) -> bool:
        """Keep the collectives that count; return whether they are enough."""
        least = max(2, len(self.ranks) // 2 + 1)
        self.arrived = defaultdict(list, {n: sorted(found) for n, found in self.arrived.items() if len(found) >= least})
        return len(self.arrived) >= MIN_COLLECTIVES


class _WaitsElsewhere:
    """How long each rank waited in other groups between two collectives of one."""

    def __init__(self, groups: Mapping[str, _GroupArrivals]) -> None:
        self._seconds: dict[tuple[str, int, int], float] = {}
        if len(groups) < 2:
            return
        steps: defaultdict[int, list[tuple[float, str, int, float]]] = defaultdict(list)
        for name, group in groups.items():
            for number, found in group.arrived.items():
                for seconds, rank in found:
                    steps[rank].append((seconds, name, number, found[-1][0] - seconds))
        for rank, taken in steps.items():
            waited = 0.0
            before: dict[str, float] = {}
            for _, name, number, wait in sorted(taken):
                self._seconds[name, number, rank] = waited - before.get(name, 0.0)
                waited += wait
                before[name] = waited

    def seconds_waited_elsewhere(self, group: str, number: int, rank: int, other: int) -> float:
        """Seconds by which ``rank`` had waited elsewhere longer than ``other``."""
        excuse = self._seconds.get((group, number, rank), 0.0) - self._seconds.get((group, number, other), 0.0)
        return max(0.0, excuse)


def _group_lateness(name: str, group: _GroupArrivals, clocks: _ClockTable, excuses: _WaitsElsewhere) -> GroupLateness:
    noise = max(MIN_LATENESS_S, median(_median_arrival(found)[0] - found[0][0] for found in group.arrived.values()))
    late: defaultdict[int, list[float]] = defaultdict(list)
    excused: defaultdict[int, float] = defaultdict(float)
    unclear, errors = 0.0, []
    for number, found in group.arrived.items():
        (seconds, rank), (middle, other) = found[-1], _median_arrival(found)
        excuse = min(seconds - middle, excuses.seconds_waited_elsewhere(name, number, rank, other))
        lateness, error = seconds - middle - excuse, clocks.error(rank, other)
        excused[rank] += excuse
        # The last rank has the result later, by the way to the others (half a round trip), and so is last once more.
        if lateness > noise + 2 * error:
            late[rank].append(lateness)
        elif lateness > noise or error == math.inf:
            unclear += lateness if error < math.inf else error
            errors.append(error)
    first = min(found[0][0] for found in group.arrived.values())
    whole = max(found[-1][0] for found in group.arrived.values()) - first or 1.0
    ranks = []
    for rank in sorted(group.ranks):
        waits = sorted(late[rank])
        shares = sum(waits) / whole, sum(waits[:-IGNORED_OUTLIERS]) / whole, excused[rank] / whole
        ranks.append(RankLateness(rank, len(waits), median(waits or [0.0]), *shares))
    error = median(errors or [0.0])
    return GroupLateness(name, group.description, len(group.arrived), whole, tuple(ranks), unclear / whole, error)


def _median_arrival(found: list[tuple[float, int]]) -> tuple[float, int]:
    """The arrival by which at least half of those before the last were there."""
    return found[(len(found) - 2) // 2]


def typical_gap(arrivals: Iterable[CollectiveArrivals]) -> float:
    """Seconds of the gap between two collectives in which, with longer ones, half of the time has passed.

    That is the gap between two steps, however many collectives a step has; 0 where there are too few of them.
    """
    gaps = sorted((gap for each in arrivals if len(each.gaps) >= MIN_COLLECTIVES for gap in each.gaps), reverse=True)
    half = sum(gaps) / 2
    return next((gap / 1e6 for gap, passed in zip(gaps, accumulate(gaps), strict=True) if passed >= half), 0.0)


# ------------------------------------------------------------------------------------------------------- for people


def describe_slow_ranks(groups: Iterable[GroupLateness]) -> tuple[str, ...]:
    """Say who is slow, the most costly first; nothing where the ranks are alike, or too little is known of them."""
    said: set[int] = set()
    found: list[str] = []
    groups = list(groups)
    for group in sorted(groups, key=lambda each: -sum(rank.waited_fraction for rank in each.slow_ranks)):
        slow = [each for each in group.slow_ranks if each.rank not in said]
        said.update(each.rank for each in slow)
        parts = [[each] for each in slow] if len(slow) <= 2 else [slow]
        found += [_sentence(part, group) for part in parts if part]
        if not group.slow_ranks and group.unclear_fraction >= MIN_COST_FRACTION:
            found.append(_describe_uncertainty(group))
    found += [
        _describe_other_causes(group)
        for group in groups
        if any(each.excused_fraction >= MIN_COST_FRACTION for each in group.ranks)
    ]
    return tuple(dict.fromkeys(found))[:MAX_SENTENCES]


def _sentence(slow: list[RankLateness], group: GroupLateness) -> str:
    """ "rank 5 arrived last in 92 % of the last 2,000 collectives, 38 ms late in the median: 11 % of …"."""
    last, waited = sum(each.times_last for each in slow), sum(each.waited_fraction for each in slow)
    lateness = sum(each.lateness * each.times_last for each in slow) / last
    share = last / group.collectives
    often = f"{100 * share:.0f} %" if share >= 0.01 else f"{last}"
    which = "" if group.description == "default_pg" else f" of {_group_name(group)}"
    return (
        f"{_ranks(slow)} arrived last in {often} of the last {group.collectives:,} collectives{which},"
        f" {_span(lateness)} late in the median: {100 * waited:.0f} % of that time waited for"
        f" {'it' if len(slow) == 1 else 'them'}"
    )


def _describe_other_causes(group: GroupLateness) -> str:
    late = [each for each in group.ranks if each.excused_fraction >= MIN_COST_FRACTION]
    names = f"{_ranks(late)} arrived late at the collectives of {_group_name(group)}"
    return f"{names} because {'it' if len(late) == 1 else 'they'} waited in another group"


def _ranks(paces: list[RankLateness]) -> str:
    return words.format_ranks(each.rank for each in paces)


def _group_name(group: GroupLateness) -> str:
    return f"group {group.group}" if group.description in ("", "undefined") else group.description


def _describe_uncertainty(group: GroupLateness) -> str:
    known = "have not been compared yet" if group.error == math.inf else f"are known to {_span(group.error)} only"
    return f"which node is slow cannot be told: their clocks {known}"


def _span(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
