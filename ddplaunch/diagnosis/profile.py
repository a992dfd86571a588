"""Where ranks spent their time: what was found at each tick of a profile, in a form that travels. Plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.diagnosis.collectives import recorded
from ddplaunch.diagnosis.inspection import Frame
from ddplaunch.diagnosis.stack_dump import frame, in_ranks, starts
from ddplaunch.errors import shown

if TYPE_CHECKING:
    from ddplaunch.wire.bounds import Count, Line, Moment, Name, Path, Seconds, Shift, Table

PERIOD = 0.02  # seconds between two ticks
LONGEST = 60  # seconds of a profile
_ALL_PLACES, _PLACES, _LEAST_PLACES = (
    256_000,
    4_000,
    200,
)  # in the trees of calls: of all ranks, of one at most, at least
_ALL_CALLS, _CALLS, _LEAST_CALLS = 200_000, 2_000, 50  # collectives, likewise


@dataclass(frozen=True)
class Kind:
    """Collectives of one process group that are alike."""

    group: Line
    description: Line  # "default_pg", or what the program called the group
    operation: Line
    tensors: Line  # "float32[6]"


STARTING = "it is still starting"
"""Why there is no profile of a rank whose program has not begun."""


@dataclass(frozen=True)
class RankProfile:
    """Where the main thread of one rank was at each tick, and the collectives that it entered meanwhile."""

    rank: Count
    host: Name
    why_not: Line = ""  # there is no profile of it: "it is not a Python program"
    began: Moment = 0.0  # seconds since the epoch, by the clock of its host; of node 0 once that has heard of it
    error: Seconds | None = 0.0  # by which that may be wrong; None where the clocks were not compared
    frames: tuple[Frame, ...] = ()
    places: Table = ()  # rows of two: 1 + the row from which it is called or 0, which frame
    ticks: Table = ()  # rows of two in time: 1 + the innermost place or 0, for how many ticks
    kinds: tuple[Kind, ...] = ()
    calls: Table = ()  # rows of four: which kind, number in its group, microseconds of its begin and end (0: unknown)
    torch: Path = ""  # the file of torch's own profiler, on its host
    ahead: Shift = 0.0  # by which the clock of its host, as that file has it, is ahead of the one of ``began``

    def __post_init__(self) -> None:
        above = all(parent <= row for row, parent in enumerate(self.places[::2]))
        known = max(self.places[1::2], default=-1) < len(self.frames) and max(self.calls[::4], default=-1) < len(
            self.kinds
        )
        whole = not (len(self.places) % 2 or len(self.ticks) % 2 or len(self.calls) % 4)
        if not (above and known and whole and max(self.ticks[::2], default=0) <= len(self.places) // 2):
            raise ValueError("a profile that contradicts itself")

    def aligned(self, ahead: float, error: float) -> RankProfile:
        """By a clock that is ``ahead`` seconds behind that of its host, give or take ``error``."""
        began, known = max(self.began - ahead, 0.0), None if error == math.inf else error
        return replace(self, began=began, error=known, ahead=ahead)

    @property
    def count(self) -> int:
        """The ticks in it."""
        return sum(self.ticks[1::2])

    def stack(self, place: int) -> tuple[Frame, ...]:
        """The calls at 1 + a row of ``places``, the innermost first."""
        found = []
        while place:
            found.append(self.frames[self.places[2 * place - 1]])
            place = self.places[2 * place - 2]
        return tuple(found)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Places with the ticks spent there, in time."""
        yield from zip(self.ticks[::2], self.ticks[1::2], strict=True)

    def collectives(self) -> Iterator[tuple[Kind, int, float, float]]:
        """Kind, number in the group, begin, and end or 0: seconds since the epoch."""
        rows = zip(*(self.calls[column::4] for column in range(4)), strict=True)
        for kind, number, begin, end in rows:
            yield self.kinds[kind], number, self.began + begin / 1e6, end and self.began + end / 1e6


def most_places(world_size: int) -> int:
    """How many places a rank tells at most, so that those of all can be brought to one place."""
    return max(_LEAST_PLACES, min(_PLACES, _ALL_PLACES // world_size))


def read_profile(
    told: bytes, rank: int, host: str, began: float, seconds: float, size: int, folder: str
) -> RankProfile:
    """Read what ``rank/sampler.py`` wrote; ValueError or IndexError where that is something else.

    ``size`` is the job's world size, ``folder`` where it runs: files below are named relative to it.
    """
    rows: dict[bytes, list[bytes]] = {}
    for row in told.split(b"\n"):
        rows.setdefault(row[:2], []).append(row[2:])
    codes = [tuple(each.decode(errors="replace").split("\t")) for each in rows.get(b"c ", ())]
    frames: dict[Frame, int] = {}
    places: list[int] = []
    new = [0]  # by the number of a place as it was written: what it is here
    for each in rows.get(b"n ", ()):
        parent, code, line = map(int, each.split())
        function, path = codes[code]
        at = frame(shown(function, 600), shown(path, 600), line, folder)
        if at.file.startswith(in_ranks()) or (not new[parent] and starts(at)):
            new.append(new[parent])  # it is not the program's
            continue
        places += (new[parent], frames.setdefault(at, len(frames)))
        new.append(len(places) // 2)
    (runs,) = rows[b"r "]
    numbers = [int(each) for each in runs.split()]
    ticks = [new[each] if not index % 2 else each for index, each in enumerate(numbers)]
    kinds: dict[Kind, int] = {}
    calls: list[int] = []
    for trace in rows.get(b"t ", ()):
        for call, description, ended in recorded(trace, began, began + seconds):
            kind = Kind(call.group, description, call.operation, call.tensors)
            times = [max(round((each - began) * 1e6), 0) for each in (call.entered, ended)]
            calls += (kinds.setdefault(kind, len(kinds)), call.number, *times)
    calls = calls[-4 * max(_LEAST_CALLS, min(_CALLS, _ALL_CALLS // size)) :]
    return RankProfile(
        rank, host, "", began, 0.0, tuple(frames), tuple(places), tuple(ticks), tuple(kinds), tuple(calls)
    )
