"""A profile of one rank as plain data: where its main thread was at each tick, and its collectives; and its parser."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.stack_frames import Frame, is_internal_file, is_module_start, make_frame
from ddplaunch.base.types import ClockDifference, Count, IntTable, Name, Path, Seconds, TextLine, Timestamp
from ddplaunch.observe.diagnosis.flight_recorder import collectives_between

TICK_INTERVAL_S = 0.02
MAX_PROFILE_S = 60
TORCH_START_S = 30.0
"""Time for all ranks to start torch's profiler: its libraries are loaded then, which takes long on a slow machine."""
# Nodes in the call trees, and collectives: of all ranks together; of one rank at most and at least.
_MAX_TOTAL_PLACES, _MAX_PLACES, _MIN_PLACES = 256_000, 4_000, 200
_MAX_TOTAL_CALLS, _MAX_CALLS, _MIN_CALLS = 200_000, 2_000, 50


class CollectiveKind(Struct, frozen=True):
    """Collectives of one process group with the same operation and tensors."""

    group: TextLine
    description: TextLine  # "default_pg", or the name that the program gave it
    operation: TextLine
    tensors: TextLine  # "float32[6]"


STARTING = "it is still starting"
"""The ``missing_reason`` of a rank whose program has not begun."""


class RankProfile(Struct, frozen=True):
    """Where the main thread of one rank was at each tick, and the collectives that it entered.

    ``places`` is a call tree. A place is a number: 1 + its row in ``places``, or 0 for none.
    """

    rank: Count
    host: Name
    missing_reason: TextLine = ""  # if there is no profile: "it is not a Python program"
    began: Timestamp = 0.0  # seconds since the epoch, by its host's clock; by node 0's after ``with_clock_offset``
    error: Seconds | None = 0.0  # maximum error of ``began``; None if the clocks were not compared
    frames: tuple[Frame, ...] = ()
    places: IntTable = ()  # rows of two: the caller's place, index in ``frames``
    ticks: IntTable = ()  # rows of two in time order: the innermost place, number of ticks
    kinds: tuple[CollectiveKind, ...] = ()
    calls: IntTable = ()  # rows of four: index in ``kinds``, number in its group, begin and end in µs (0: unknown)
    torch: Path = ""  # the file of torch's own profiler, on its host
    no_torch: TextLine = ""  # why there is none: "it has not imported torch"
    clock_offset_s: ClockDifference = 0.0  # its host's clock, used in that file, minus the clock of ``began``

    def __post_init__(self) -> None:
        above = all(parent <= row for row, parent in enumerate(self.places[::2]))
        known = max(self.places[1::2], default=-1) < len(self.frames)
        known = known and max(self.calls[::4], default=-1) < len(self.kinds)
        complete = not (len(self.places) % 2 or len(self.ticks) % 2 or len(self.calls) % 4)
        if not (above and known and complete and max(self.ticks[::2], default=0) <= len(self.places) // 2):
            raise ValueError("a profile that contradicts itself")

    def with_clock_offset(self, offset_s: float, error: float) -> RankProfile:
        """Return the profile by node 0's clock; the host's clock is ahead of node 0's by ``offset_s`` ± ``error``."""
        began, known = max(self.began - offset_s, 0.0), None if error == math.inf else error
        return replace(self, began=began, error=known, clock_offset_s=offset_s)

    @property
    def tick_count(self) -> int:
        """The number of ticks."""
        return sum(self.ticks[1::2])

    def stack(self, place: int) -> tuple[Frame, ...]:
        """Return the stack of a place, the innermost call first."""
        frames = []
        while place:
            frames.append(self.frames[self.places[2 * place - 1]])
            place = self.places[2 * place - 2]
        return tuple(frames)

    def tick_runs(self) -> Iterator[tuple[int, int]]:
        """Yield places with the number of ticks spent there, in time order."""
        yield from zip(self.ticks[::2], self.ticks[1::2], strict=True)

    def collectives(self) -> Iterator[tuple[CollectiveKind, int, float, float]]:
        """Yield kind, number in the group, begin, and end (0 if unknown) in seconds since the epoch."""
        rows = zip(*(self.calls[column::4] for column in range(4)), strict=True)
        for kind, number, begin, end in rows:
            yield self.kinds[kind], number, self.began + begin / 1e6, end and self.began + end / 1e6


def max_places(world_size: int) -> int:
    """Return how many places a rank may report, so that those of all ranks fit in one profile."""
    return max(_MIN_PLACES, min(_MAX_PLACES, _MAX_TOTAL_PLACES // world_size))


def parse_profile(
    data: bytes, rank: int, host: str, began: float, seconds: float, size: int, folder: str
) -> RankProfile:
    """Parse the output of ``features/profile/rank/profile_sampler.py``; ValueError or IndexError if it is invalid.

    ``size`` is the world size; files below ``folder``, the job's, are named relative to it.
    """
    rows: dict[bytes, list[bytes]] = {}
    for row in data.split(b"\n"):
        rows.setdefault(row[:2], []).append(row[2:])
    codes = [tuple(each.decode(errors="replace").split("\t")) for each in rows.get(b"c ", ())]
    frames: dict[Frame, int] = {}
    places: list[int] = []
    new = [0]  # by place in ``data``: the place in the profile
    for row in rows.get(b"n ", ()):
        parent, code, line = map(int, row.split())
        function, path = codes[code]
        at = make_frame(sanitize_line(function, 600), sanitize_line(path, 600), line, folder)
        if is_internal_file(at.file) or (not new[parent] and is_module_start(at)):
            new.append(new[parent])  # a frame of ddplaunch or runpy
            continue
        places += (new[parent], frames.setdefault(at, len(frames)))
        new.append(len(places) // 2)
    (runs,) = rows[b"r "]
    numbers = [int(each) for each in runs.split()]
    ticks = [new[each] if not index % 2 else each for index, each in enumerate(numbers)]
    kinds: dict[CollectiveKind, int] = {}
    calls: list[int] = []
    for trace in rows.get(b"t ", ()):
        for call, description, ended in collectives_between(trace, began, began + seconds):
            kind = CollectiveKind(call.group, description, call.operation, call.tensors)
            times = [max(round((each - began) * 1e6), 0) for each in (call.entered, ended)]
            calls += (kinds.setdefault(kind, len(kinds)), call.number, *times)
    calls = calls[-4 * max(_MIN_CALLS, min(_MAX_CALLS, _MAX_TOTAL_CALLS // size)) :]
    return RankProfile(
        rank, host, "", began, 0.0, tuple(frames), tuple(places), tuple(ticks), tuple(kinds), tuple(calls)
    )
