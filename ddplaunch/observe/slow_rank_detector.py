"""Slow-rank detection on node 0: which ranks enter collectives last, from the arrival times of all nodes' ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.base.frames import ProtocolError
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals, Inspection
from ddplaunch.observe.diagnosis.slow_ranks import (
    RankClock,
    describe_slow_ranks,
    mean_lateness,
    measure_lateness,
)

MAX_ARRIVALS = 1_000_000  # stored of all nodes together: several times what they send


class SlowRankDetector:
    """Collects the arrivals of one attempt and finds its slow ranks."""

    def __init__(self) -> None:
        self._arrivals: list[CollectiveArrivals] = []
        self._clocks: dict[int, RankClock] = {}
        self._room_left = MAX_ARRIVALS

    def add_arrivals(self, node: int, own: range, arrivals: Sequence[CollectiveArrivals], offset: ClockOffset) -> None:
        """Add the arrivals of a node's ranks ``own``; ProtocolError if they are of other ranks, or came before."""
        ranks = {each.rank for each in arrivals}
        if any(rank not in own for rank in ranks) or ranks & self._clocks.keys():
            raise ProtocolError("collectives of ranks that are not its own, or again")
        self._room_left -= sum(len(each.gaps) + 1 for each in arrivals)
        if self._room_left >= 0:
            self._arrivals += arrivals
            self._clocks |= dict.fromkeys(ranks, RankClock(node, offset.offset_s, offset.error_s))

    def describe(self) -> tuple[str, ...]:
        """Describe the slow ranks, a sentence each; none if no rank is slow or the run was short."""
        if not self._arrivals:
            return ()
        return describe_slow_ranks(measure_lateness(self._arrivals, self._clocks))


def add_slow_ranks(
    inspection: Inspection, nodes: Mapping[int, int], clock_of: Callable[[int], ClockOffset]
) -> Inspection:
    """Replace the arrival times in an inspection by each rank's lateness and sentences; ``nodes``: each rank's node."""
    offsets = {node: clock_of(node) for node in set(nodes.values())}
    clocks = {rank: RankClock(node, offsets[node].offset_s, offsets[node].error_s) for rank, node in nodes.items()}
    groups = measure_lateness([each for rank in inspection.ranks for each in rank.arrivals], clocks)
    late = mean_lateness(groups)
    ranks = tuple(replace(rank, arrivals=(), late=late.get(rank.rank)) for rank in inspection.ranks)
    return replace(inspection, ranks=ranks, pace=describe_slow_ranks(groups))
