"""Parses from torch's flight recorder when a rank arrived at its last collectives; the result is compact.

torch records the last 2,000 operations of each rank, on every backend; ``_dump_fr_trace_json(True, False)`` returns
them. The time is that of the call, by the clock of the rank's host.
"""

from __future__ import annotations

from itertools import pairwise

from ddplaunch.observe.diagnosis.flight_recorder import RecordedOperations, decode_dump
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals

MAX_RECORDED_OPERATIONS = 2000
"""Operations that torch records of a rank (TORCH_FR_BUFFER_SIZE)."""

_MAX_ARRIVALS, _MIN_ARRIVALS_PER_RANK = 200_000, 50  # of all ranks together at most; of one at least
_MAX_SEQUENCES = 64  # runs of consecutive collectives


def operations_per_rank(world_size: int) -> int:
    """Return how many of its last operations each rank reports: fewer in a large job, as node 0 compares all ranks."""
    return max(_MIN_ARRIVALS_PER_RANK, min(MAX_RECORDED_OPERATIONS, _MAX_ARRIVALS // world_size))


def parse_arrivals(rank: int, trace: bytes, most: int = MAX_RECORDED_OPERATIONS) -> tuple[CollectiveArrivals, ...]:
    """Parse when a rank arrived at the last ``most`` operations in a trace: one item per run of consecutive numbers.

    torch leaves out the entries of a recorder without operations, as that of NCCL where a job uses gloo.

    Raises ValueError if the trace is invalid.
    """
    entries = decode_dump(trace, RecordedOperations).entries or []
    runs: dict[tuple[str, str], list[tuple[int, list[int]]]] = {}
    for entry in entries[-most:]:
        if entry.is_p2p:
            continue
        group, number, microseconds = entry.group, entry.collective_seq_id, entry.time_created_ns // 1000
        of_group = runs.setdefault(group, [])
        if of_group:
            first, times = of_group[-1]
            expected = first + len(times)
            if number == expected:
                times.append(microseconds)
                continue
            if number == expected - 1:  # several operations made one collective
                continue
            if number < expected:  # another group with the name of one that was destroyed
                of_group.clear()
        of_group.append((number, [microseconds]))
    arrivals = [
        CollectiveArrivals(rank, *group, first, times[0] / 1e6, tuple(b - a for a, b in pairwise(times)))
        for group, of_group in runs.items()
        for first, times in of_group
    ]
    return tuple(arrivals[-_MAX_SEQUENCES:])
