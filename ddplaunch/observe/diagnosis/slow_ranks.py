"""Finds slow ranks: which ranks arrive last at collectives, how often, how late, and what waiting for them costs.

The lateness of a rank is the time since at least half of the others had arrived, less the time that it waited itself
in other process groups meanwhile. A rank is slow if the others repeatedly wait much longer for it than for the next
one. Times of different hosts are compared only as precisely as their clock offset is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.base import text
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals

MIN_COLLECTIVES = 10  # fewer are not evaluated
MIN_LATENESS_S = 1e-4  # ranks of one host differ by so much at random
MIN_COST_FRACTION = 0.02  # of the time; less is not reported
OUTLIER_FACTOR = 3.0  # a slow rank costs more than the next one by this factor
COMPARABLE_COST_RATIO = 0.2  # of the slowest rank's cost: what another slow rank costs at least
MIN_TIMES_LAST = 5  # a slow rank was last at least so often
IGNORED_OUTLIERS = 2  # longest waits for a rank that do not count
MAX_SENTENCES = 3


class RankClock(NamedTuple):
    """The clock of a rank's arrivals: its offset from the reference clock, as far as it is known."""

    node: int
    offset_s: float = 0.0
    error_s: float = 0.0  # maximum error of ``offset_s``, either way; infinite if it was not measured


class RankLateness(Struct, frozen=True):
    """How late one rank arrived at the collectives of a process group."""

    rank: int
    times_last: int  # how often it arrived last, and late
    lateness: float  # median delay of these late arrivals, in seconds
    waited_fraction: float  # share of the total time in which the others waited for this rank
    usual_fraction: float  # the same without the longest waits
    excused_fraction: float  # share of the total time by which it was late because it waited in another group

    @property
    def blamed_fraction(self) -> float:
        """The share of the time in which others waited for this rank; 0 if its waits in other groups explain that."""
        return self.usual_fraction if self.usual_fraction > self.excused_fraction else 0.0


class GroupLateness(Struct, frozen=True):
    """How late the ranks of one process group arrived at its collectives."""

    group: str
    description: str
    collectives: int  # how many were compared
    seconds: float  # from the first to the last of them
    ranks: tuple[RankLateness, ...]  # in order
    unclear_fraction: float  # time lost to a rank that the clocks do not identify; inf if no clock was measured
    error: float  # seconds of clock error that made it unclear

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
    """Measure how late ranks arrive at the collectives of each process group; ``clocks``: by rank; None: all share one.

    Only collectives count for which the arrivals of more than half of the group's ranks are known. A group with fewer
    than ``MIN_COLLECTIVES`` of these is left out.
    """
    table = _RankClocks(clocks or {})
    groups: dict[str, _GroupArrivals] = {}
    for collectives in arrivals:
        group = groups.setdefault(collectives.group, _GroupArrivals(collectives.description))
        group.ranks.add(collectives.rank)
        offset = table[collectives.rank].offset_s
        for number, seconds in collectives:
            group.arrived[number].append((seconds - offset, collectives.rank))
    comparable = {name: group for name, group in groups.items() if group.keep_comparable_collectives()}
    excuses = _WaitsInOtherGroups(comparable)
    return tuple(_measure_group_lateness(name, group, table, excuses) for name, group in comparable.items())


def mean_lateness(groups: Iterable[GroupLateness]) -> dict[int, float]:
    """Return by rank its mean lateness, in seconds, over a group's compared collectives: the largest of its groups."""
    lateness: dict[int, float] = {}
    for group in groups:
        for each in group.ranks:
            mean = each.lateness * each.times_last / group.collectives
            lateness[each.rank] = max(mean, lateness.get(each.rank, 0.0))
    return lateness


class _RankClocks(dict[int, RankClock]):
    def __missing__(self, rank: int) -> RankClock:
        return RankClock(0)

    def error(self, rank: int, other: int) -> float:
        """Return the maximum error of the time between arrivals of two ranks, in seconds."""
        one, two = self[rank], self[other]
        return 0.0 if one.node == two.node else one.error_s + two.error_s


class _GroupArrivals:
    """The arrivals at the collectives of one group."""

    def __init__(self, description: str) -> None:
        self.description = description
        self.ranks: set[int] = set()
        self.arrived: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # by number: time and rank, sorted

    def keep_comparable_collectives(self) -> bool:
        """Drop collectives at which too few arrivals are known; return whether enough collectives are left."""
        min_ranks = max(2, len(self.ranks) // 2 + 1)
        self.arrived = defaultdict(
            list, {n: sorted(found) for n, found in self.arrived.items() if len(found) >= min_ranks}
        )
        return len(self.arrived) >= MIN_COLLECTIVES


class _WaitsInOtherGroups:
    """How long each rank waited in other groups between two collectives of one group."""

    def __init__(self, groups: Mapping[str, _GroupArrivals]) -> None:
        self._seconds: dict[tuple[str, int, int], float] = {}
        if len(groups) < 2:
            return
        steps: defaultdict[int, list[tuple[float, str, int, float]]] = defaultdict(list)
        for name, group in groups.items():
            for number, found in group.arrived.items():
                for seconds, rank in found:
                    steps[rank].append((seconds, name, number, found[-1][0] - seconds))
        for rank, rank_steps in steps.items():
            waited = 0.0
            before: dict[str, float] = {}
            for _, name, number, wait in sorted(rank_steps):
                self._seconds[name, number, rank] = waited - before.get(name, 0.0)
                waited += wait
                before[name] = waited

    def seconds_waited_elsewhere(self, group: str, number: int, rank: int, other: int) -> float:
        """Return how much longer than ``other`` the rank ``rank`` had waited in other groups before this collective."""
        excuse = self._seconds.get((group, number, rank), 0.0) - self._seconds.get((group, number, other), 0.0)
        return max(0.0, excuse)


def _measure_group_lateness(
    name: str, group: _GroupArrivals, clocks: _RankClocks, excuses: _WaitsInOtherGroups
) -> GroupLateness:
    noise = max(
        MIN_LATENESS_S, median(_median_arrival(arrivals)[0] - arrivals[0][0] for arrivals in group.arrived.values())
    )
    late: defaultdict[int, list[float]] = defaultdict(list)
    excused: defaultdict[int, float] = defaultdict(float)
    unclear, errors = 0.0, []
    for number, arrivals in group.arrived.items():
        (seconds, rank), (middle, other) = arrivals[-1], _median_arrival(arrivals)
        excuse = min(seconds - middle, excuses.seconds_waited_elsewhere(name, number, rank, other))
        lateness, error = seconds - middle - excuse, clocks.error(rank, other)
        excused[rank] += excuse
        # The last rank gets the result later, by half a round trip to the others, and so is last again.
        if lateness > noise + 2 * error:
            late[rank].append(lateness)
        elif lateness > noise or error == math.inf:
            unclear += lateness if error < math.inf else error
            errors.append(error)
    first = min(arrivals[0][0] for arrivals in group.arrived.values())
    total = max(arrivals[-1][0] for arrivals in group.arrived.values()) - first or 1.0
    ranks = []
    for rank in sorted(group.ranks):
        waits = sorted(late[rank])
        shares = sum(waits) / total, sum(waits[:-IGNORED_OUTLIERS]) / total, excused[rank] / total
        ranks.append(RankLateness(rank, len(waits), median(waits or [0.0]), *shares))
    error = median(errors or [0.0])
    return GroupLateness(name, group.description, len(group.arrived), total, tuple(ranks), unclear / total, error)


def _median_arrival(found: list[tuple[float, int]]) -> tuple[float, int]:
    """Return time and rank of the median arrival at a collective, without the last arrival."""
    return found[(len(found) - 2) // 2]


def typical_collective_gap_s(arrivals: Iterable[CollectiveArrivals]) -> float:
    """Return the time-weighted median of the gaps between collectives, in seconds; 0 with too few of them.

    That is about the time of a training step, however many collectives a step has.
    """
    gaps = sorted((gap for each in arrivals if len(each.gaps) >= MIN_COLLECTIVES for gap in each.gaps), reverse=True)
    half = sum(gaps) / 2
    return next((gap / 1e6 for gap, passed in zip(gaps, accumulate(gaps), strict=True) if passed >= half), 0.0)


# -------------------------------------------------------------------------------------------------------- sentences


def describe_slow_ranks(groups: Iterable[GroupLateness]) -> tuple[str, ...]:
    """Describe the slow ranks, the most costly first; () if there are none, or too little is known."""
    described: set[int] = set()
    sentences: list[str] = []
    groups = list(groups)
    for group in sorted(groups, key=lambda each: -sum(rank.waited_fraction for rank in each.slow_ranks)):
        slow = [each for each in group.slow_ranks if each.rank not in described]
        described.update(each.rank for each in slow)
        parts = [[each] for each in slow] if len(slow) <= 2 else [slow]
        sentences += [_describe_slow_ranks(part, group) for part in parts if part]
        if not group.slow_ranks and group.unclear_fraction >= MIN_COST_FRACTION:
            sentences.append(_describe_clock_uncertainty(group))
    sentences += [
        _describe_excused_ranks(group)
        for group in groups
        if any(each.excused_fraction >= MIN_COST_FRACTION for each in group.ranks)
    ]
    return tuple(dict.fromkeys(sentences))[:MAX_SENTENCES]


def _describe_slow_ranks(slow: list[RankLateness], group: GroupLateness) -> str:
    """Describe slow ranks: "rank 5 was last in 92 % of the last 2,000 collectives (median delay 38 ms); …"."""
    last, waited = sum(each.times_last for each in slow), sum(each.waited_fraction for each in slow)
    lateness = sum(each.lateness * each.times_last for each in slow) / last
    share = last / group.collectives
    often = f"{100 * share:.0f} %" if share >= 0.01 else f"{last}"
    which = "" if group.description == "default_pg" else f" of {_group_name(group)}"
    return (
        f"{_format_ranks(slow)} {'was' if len(slow) == 1 else 'were'} last in {often} of the last {group.collectives:,}"
        f" collectives{which} (median delay {_format_duration(lateness)}); the others spent {100 * waited:.0f} % of the"
        f" time waiting for {'it' if len(slow) == 1 else 'them'}"
    )


def _describe_excused_ranks(group: GroupLateness) -> str:
    late = [each for each in group.ranks if each.excused_fraction >= MIN_COST_FRACTION]
    names = f"{_format_ranks(late)} arrived late at the collectives of {_group_name(group)}"
    return f"{names} because {'it' if len(late) == 1 else 'they'} waited in another group"


def _format_ranks(paces: list[RankLateness]) -> str:
    return text.format_ranks(each.rank for each in paces)


def _group_name(group: GroupLateness) -> str:
    return f"group {group.group}" if group.description in ("", "undefined") else group.description


def _describe_clock_uncertainty(group: GroupLateness) -> str:
    known = (
        "have not been compared yet"
        if group.error == math.inf
        else f"are known to {_format_duration(group.error)} only"
    )
    return f"cannot determine which node is slow: their clocks {known}"


def _format_duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
