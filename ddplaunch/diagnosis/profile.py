"""Where ranks spent their time: what was found at each tick of a profile, in a form that travels. Plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.diagnosis.collectives import collectives_between
from ddplaunch.diagnosis.inspection import Frame
from ddplaunch.diagnosis.stack_dump import internal_prefixes, is_module_start, make_frame
from ddplaunch.errors import sanitize_line

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import ClockDifference, Count, IntTable, Name, Path, Seconds, TextLine, Timestamp

TICK_INTERVAL_S = 0.02  # seconds between two ticks
MAX_PROFILE_S = 60  # seconds of a profile
_MAX_TOTAL_PLACES, _MAX_PLACES, _MIN_PLACES = (
    256_000,
    4_000,
    200,
)  # in the trees of calls: of all ranks, of one at most, at least
_MAX_TOTAL_CALLS, _MAX_CALLS, _MIN_CALLS = 200_000, 2_000, 50  # collectives, likewise


@dataclass(frozen=True)
class CollectiveKind:
    """Collectives of one process group that are alike."""

    group: TextLine
    description: TextLine  # "default_pg", or what the program called the group
    operation: TextLine
    tensors: TextLine  # "float32[6]"


STARTING = "it is still starting"
"""Why there is no profile of a rank whose program has not begun."""


@dataclass(frozen=True)
class RankProfile:
    """Where the main thread of one rank was at each tick, and the collectives that it entered meanwhile."""

    rank: Count
    host: Name
    missing_reason: TextLine = ""  # there is no profile of it: "it is not a Python program"
    began: Timestamp = 0.0  # seconds since the epoch, by the clock of its host; of node 0 once that has heard of it
    error: Seconds | None = 0.0  # by which that may be wrong; None where the clocks were not compared
    frames: tuple[Frame, ...] = ()
    places: IntTable = ()  # rows of two: 1 + the row from which it is called or 0, which frame
    ticks: IntTable = ()  # rows of two in time: 1 + the innermost place or 0, for how many ticks
    kinds: tuple[CollectiveKind, ...] = ()
    calls: IntTable = ()  # rows of four: which kind, number in its group, microseconds of its begin and end (0: unknown)
    torch: Path = ""  # the file of torch's own profiler, on its host
    clock_offset_s: ClockDifference = (
        0.0  # by which the clock of its host, as that file has it, is ahead of the one of ``began``
    )

    def __post_init__(self) -> None:
        above = all(parent <= row for row, parent in enumerate(self.places[::2]))
        known = max(self.places[1::2], default=-1) < len(self.frames) and max(self.calls[::4], default=-1) < len(
            self.kinds
        )
        whole = not (len(self.places) % 2 or len(self.ticks) % 2 or len(self.calls) % 4)
        if not (above and known and whole and max(self.ticks[::2], default=0) <= len(self.places) // 2):
            raise ValueError("a profile that contradicts itself")

    def with_clock_offset(self, ahead: float, error: float) -> RankProfile:
        """By a clock that is ``clock_offset_s`` seconds behind that of its host, give or take ``error``."""
        began, known = max(self.began - ahead, 0.0), None if error == math.inf else error
        return replace(self, began=began, error=known, clock_offset_s=ahead)

    @property
    def tick_count(self) -> int:
        """The ticks in it."""
        return sum(self.ticks[1::2])

    def stack(self, place: int) -> tuple[Frame, ...]:
        """The calls at 1 + a row of ``places``, the innermost first."""
        found = []
        while place:
            found.append(self.frames[self.places[2 * place - 1]])
            place = self.places[2 * place - 2]
        return tuple(found)

    def tick_runs(self) -> Iterator[tuple[int, int]]:
        """Places with the ticks spent there, in time."""
        yield from zip(self.ticks[::2], self.ticks[1::2], strict=True)

    def collectives(self) -> Iterator[tuple[CollectiveKind, int, float, float]]:
        """Kind, number in the group, begin, and end or 0: seconds since the epoch."""
        rows = zip(*(self.calls[column::4] for column in range(4)), strict=True)
        for kind, number, begin, end in rows:
            yield self.kinds[kind], number, self.began + begin / 1e6, end and self.began + end / 1e6


def max_places(world_size: int) -> int:
    """How many places a rank tells at most, so that those of all can be brought to one place."""
    return max(_MIN_PLACES, min(_MAX_PLACES, _MAX_TOTAL_PLACES // world_size))


def parse_profile(
    data: bytes, rank: int, host: str, began: float, seconds: float, size: int, folder: str
) -> RankProfile:
    """Read what ``rank/sampler.py`` wrote; ValueError or IndexError where that is something else.

    ``size`` is the job's world size, ``folder`` where it runs: files below are named relative to it.
    """
    rows: dict[bytes, list[bytes]] = {}
    for row in data.split(b"\n"):
        rows.setdefault(row[:2], []).append(row[2:])
    codes = [tuple(each.decode(errors="replace").split("\t")) for each in rows.get(b"c ", ())]
    frames: dict[Frame, int] = {}
    places: list[int] = []
    new = [0]  # by the number of a place as it was written: what it is here
    for each in rows.get(b"n ", ()):
        parent, code, line = map(int, each.split())
        function, path = codes[code]
        at = make_frame(sanitize_line(function, 600), sanitize_line(path, 600), line, folder)
        if at.file.startswith(internal_prefixes()) or (not new[parent] and is_module_start(at)):
            new.append(new[parent])  # it is not the program's
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
