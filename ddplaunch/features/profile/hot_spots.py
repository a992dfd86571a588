"""Hot spots of a profile: the user's lines with the most time over all ranks, and the ranks that are outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median_high
from typing import NamedTuple

from ddplaunch.base.stack_frames import Frame
from ddplaunch.features.profile.rank_profile import RankProfile
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals
from ddplaunch.observe.diagnosis.rank_position import user_frame
from ddplaunch.observe.diagnosis.slow_ranks import RankClock, describe_slow_ranks, measure_lateness

MIN_DIFFERENCE = 0.05  # of a rank's time at a line: an outlier differs from the other ranks by at least this
OUTLIER_FACTOR = 3.0  # a single outlier differs by this factor more than any other rank

_DECORATOR = "torch/distributed/c10d_logger.py"  # its frames are between the user's line and a collective's

NATIVE_FRAME = Frame("native code", "", 0, own=False)


class HotSpot(NamedTuple):
    """A line of the user's code, and the time of all ranks in it and in what it calls."""

    line: Frame
    shares: Mapping[int, float]  # of the time of each rank
    calls: str  # the function that it spends most time in: "backward"; "" if that is the line itself

    @property
    def mean_share(self) -> float:
        return fmean(self.shares.values())


class RankOutlier(NamedTuple):
    """A rank that differs from the others, and the line at which it differs most."""

    rank: int
    line: Frame
    share: float
    others: float  # their median


def find_hot_spots(profiles: Sequence[RankProfile]) -> list[HotSpot]:
    """Find the lines at which ranks were sampled, those with the most time first."""
    shares: dict[Frame, dict[int, float]] = {}
    calls: dict[Frame, Counter[str]] = {}
    for profile in profiles:
        for at, ticks in profile.tick_runs():
            stack = profile.stack(at)
            line = user_frame(stack) or (stack or (NATIVE_FRAME,))[-1]
            of_ranks = shares.setdefault(line, {each.rank: 0.0 for each in profiles})
            of_ranks[profile.rank] += ticks / profile.tick_count
            calls.setdefault(line, Counter())[_find_callee(stack, line)] += ticks
    found = [HotSpot(line, of_ranks, calls[line].most_common(1)[0][0]) for line, of_ranks in shares.items()]
    return sorted(found, key=lambda each: -each.mean_share)


def _find_callee(stack: Sequence[Frame], line: Frame) -> str:
    """Return the function that a line calls: the outermost library function with a public name, else the innermost."""
    above = stack[: stack.index(line)] if line in stack else ()
    inner = [frame.function for frame in above if not frame.own and not frame.file.endswith(_DECORATOR)]
    return next((name for name in reversed(inner) if name[0] not in "_<"), inner[0] if inner else "")


def describe_late_ranks(profiles: Iterable[RankProfile]) -> tuple[tuple[str, ...], list[int]]:
    """Describe the ranks that entered collectives late; return the sentences, and these ranks."""
    arrivals: list[CollectiveArrivals] = []
    hosts: dict[str, int] = {}
    clocks: dict[int, RankClock] = {}
    for profile in profiles:
        error = float("inf") if profile.error is None else profile.error
        clocks[profile.rank] = RankClock(hosts.setdefault(profile.host, len(hosts)), 0.0, error)
        seen: set[tuple[str, int]] = set()
        for kind, number, begin, _ in profile.collectives():
            if (kind.group, number) not in seen:  # one collective can have several operations
                seen.add((kind.group, number))
                arrivals.append(CollectiveArrivals(profile.rank, kind.group, kind.description, number, begin, ()))
    groups = measure_lateness(arrivals, clocks)
    return describe_slow_ranks(groups), [pace.rank for group in groups for pace in group.slow_ranks]


def find_outliers(spots: Sequence[HotSpot], late: Iterable[int]) -> list[RankOutlier]:
    """Find outliers: the ranks that were late in collectives, else a single rank that differs most at some line."""
    ranks = list(spots[0].shares) if spots else []
    if len(ranks) < 2:
        return []
    most = {
        rank: max((_compare_rank(spot, rank) for spot in spots), key=lambda each: each.share - each.others)
        for rank in ranks
    }
    named = [most[rank] for rank in dict.fromkeys(late) if rank in most]
    if not named:
        first, second = sorted(most.values(), key=lambda each: each.others - each.share)[:2]
        named = [first] if first.share - first.others > OUTLIER_FACTOR * max(second.share - second.others, 0.0) else []
    return [each for each in named if each.share - each.others >= MIN_DIFFERENCE]


def _compare_rank(spot: HotSpot, rank: int) -> RankOutlier:
    others = median_high(share for number, share in spot.shares.items() if number != rank)
    return RankOutlier(rank, spot.line, spot.shares[rank], others)
