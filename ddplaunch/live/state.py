"""What the live view shows, as data: the job at one moment, what each rank does, how fast the job moves. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.devices.gpu_usage import GpuUsage
from ddplaunch.devices.processes import Used
from ddplaunch.diagnosis.inspection import Condition, Inspection, RankInspection
from ddplaunch.diagnosis.standing import UNRECORDED, call_of, line_of, where
from ddplaunch.errors import shown
from ddplaunch.job.status import RankState, RankStatus, State, Status

_STOPPED_BY_US = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}


class Doing(Enum):
    """What a rank does, with the sign and the style in which it is drawn; the first ones matter most."""

    FAILED = "failed", "X", "1;31", "it has failed"
    STOPPED = "stopped", "T", "1;35", "stopped by SIGSTOP, Ctrl-Z or a debugger"
    SILENT = "silent", "?", "1;33", "it does not answer: it holds Python's lock (GIL)"
    BLOCKED = "blocked", "D", "1;33", "it waits for a disk or a driver, in the kernel"
    PENDING = "starting", "-", "2", "it has no process yet"
    RUNNING = "running", ".", "32", "it runs, and waits for no other rank"
    WAITING = "waiting", "w", "33", "it waits for other ranks, in a collective, a send or the like"
    ENDED = "ended", "e", "2", "it has ended"

    def __init__(self, word: str, sign: str, style: str, meaning: str) -> None:
        self.word, self.sign, self.style, self.meaning = word, sign, style, meaning


class WaitPoint(NamedTuple):
    """Where a rank waits."""

    group: str
    number: int
    function: str = ""  # of torch.distributed, where it is one that has neither


@dataclass(frozen=True)
class Moment:
    """A job at one moment."""

    status: Status
    inspection: Inspection
    used: Mapping[int, Used] = field(default_factory=dict)  # by rank: those on this machine
    said: Mapping[int, str] = field(default_factory=dict)  # by rank: its last line of output


@dataclass(frozen=True)
class Snapshot:
    """All that a frame is drawn from."""

    now: Moment
    before: Moment | None = None  # for what happens in a second
    gpus: tuple[GpuUsage, ...] | None = ()  # those that the job uses; None where the driver does not answer
    sentences: tuple[str, ...] = ()  # who waits for whom, or who is slow
    chosen: str = ""  # the filter: "0,3-5", or a word of a rank's line
    hint: str = ""  # what to type
    places: Mapping[int, str] = field(default_factory=dict)  # by rank: the user's line at the last close look
    late: Mapping[int, float] = field(default_factory=dict)  # by rank: seconds by which it comes after the others
    trends: Mapping[str, Trend] = field(default_factory=dict)  # by what is measured
    order: str = ""  # of the ranks in the table; "" for that of their numbers, or where they are many of their state
    cursor: int | None = None  # the chosen rank
    suspended: bool = False  # whether a signal has stopped the job's launcher


class Trend:
    """What was measured once a second, the older the coarser."""

    MOST = 400

    def __init__(self) -> None:
        self.means: list[float] = []
        self._open: list[float] = []
        self._each = 1

    def begin(self, before: Iterable[tuple[float, float]]) -> None:
        """Start with what was before the first ``add``: for how many seconds, and what."""
        known = [*before]
        while sum(seconds for seconds, _ in known) >= self._each * self.MOST / 2:
            self._each *= 2
        left = 0.0
        for seconds, value in known:
            left += seconds
            self.means += [value] * int(left // self._each)
            left %= self._each

    def add(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) < self._each:
            return
        self.means.append(sum(self._open) / self._each)
        self._open.clear()
        if len(self.means) >= self.MOST:
            self.means = [(one + other) / 2 for one, other in zip(self.means[::2], self.means[1::2], strict=True)]
            self._each *= 2

    def drawn(self, width: int, top: float = 0.0) -> str:
        """All of it in this many columns; ``top`` is the highest mark at least."""
        together = -(-len(self.means) // max(1, width)) or 1
        parts = [self.means[at : at + together] for at in range(0, len(self.means), together)]
        means = [sum(part) / len(part) for part in parts]
        top = max([top, *means]) or 1.0
        return "".join(_MARKS[min(7, int(8 * mean / top))] for mean in means)


_MARKS = "▁▂▃▄▅▆▇█"


def doing(rank: RankInspection, status: RankStatus | None = None, state: State = State.RUNNING) -> Doing:
    """What a rank does, by all that is known of it."""
    code = status.code if rank.code is None and status else rank.code
    if state is State.JOINING or (status and status.state is RankState.PENDING):
        return Doing.PENDING
    if status and status.state is RankState.UNABLE:
        return Doing.FAILED
    if state is State.ENDED or rank.condition is Condition.EXITED or (status and status.state is RankState.EXITED):
        ours = state not in (State.STARTING, State.RUNNING) and code in _STOPPED_BY_US
        return Doing.FAILED if code and not ours else Doing.ENDED
    match rank.condition:
        case Condition.PENDING:
            return Doing.PENDING
        case Condition.STOPPED:
            return Doing.STOPPED
        case Condition.BLOCKED:
            return Doing.BLOCKED
    if rank.answers is False:
        return Doing.SILENT
    return Doing.WAITING if wait_point(rank) else Doing.RUNNING


def wait_point(rank: RankInspection) -> WaitPoint | None:
    """The oldest collective that a rank has entered and not left, or its send or the like, where it has not moved."""
    if rank.moved or rank.condition is not Condition.ALIVE:
        return None
    if rank.inside and (rank.inside.function in UNRECORDED or not rank.groups):
        return WaitPoint("", 0, rank.inside.function)
    open_ones = [each for each in rank.groups if each.enqueued > each.completed]
    if not open_ones:
        return None
    found = max(open_ones, key=lambda each: each.completed)
    return WaitPoint(found.group, found.completed + 1)


def place_of(rank: RankInspection) -> str:
    """Where a rank is in the program: "all_reduce train.py:88", "load_batch data.py:31"; "" where no stack tells."""
    if (call := call_of(rank)) and call.place:
        return shown(f"{call.function} {where(call.place)}", 80)
    line = line_of(rank)
    if line is None:
        return ""
    return shown(where(line) if line.function == "<module>" else f"{line.function} {where(line)}", 80)


def steady(now: Inspection, before: Inspection | None) -> Inspection:
    """Say which ranks have moved since the inspection before, where they were asked only once."""
    if any(rank.moved or rank.threads for rank in now.ranks):
        return now
    earlier = {(rank.rank, rank.pid): rank.groups for rank in before.ranks} if before else {}
    ranks = (replace(rank, moved=rank.groups != earlier.get((rank.rank, rank.pid))) for rank in now.ranks)
    return replace(now, ranks=tuple(ranks))


def waiting(inspection: Inspection) -> frozenset[tuple[int, WaitPoint]]:
    """Each rank that waits for others, and where."""
    return frozenset((rank.rank, where) for rank in inspection.ranks if (where := wait_point(rank)))


def all_doing(seen: Snapshot) -> dict[int, Doing]:
    """What each rank does, by its number; of the ranks that the filter has chosen."""
    status, ranks = seen.now.status, seen.now.inspection.ranks
    known = {rank.rank: rank for rank in status.ranks}
    found = {each.rank: doing(each, known.get(each.rank), status.state) for each in ranks}
    if not seen.chosen:
        return found
    about = {rank.rank: f"{found[rank.rank].word} {rank.host}" for rank in ranks}
    return {rank: what for rank, what in found.items() if _chosen(seen.chosen, rank, about[rank])}


def _chosen(filter: str, rank: int, about: str) -> bool:
    for part in filter.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            if int(first) <= rank <= int(last if dash else first):
                return True
        elif part and part.lower() in about.lower():
            return True
    return False


def _seconds(seen: Snapshot) -> float:
    """The time between the two moments; 0 where there is one only."""
    return max(0.0, seen.now.inspection.moment - seen.before.inspection.moment) if seen.before else 0.0


def rate(seen: Snapshot) -> float | None:
    """Collectives a second, of the rank that completed most; None where none is known."""
    return max(rates(seen).values(), default=None)


def rates(seen: Snapshot) -> dict[int, float]:
    """Collectives that each rank completed in a second; of none where that is not known."""
    seconds = _seconds(seen)
    if seen.before is None or not seconds:
        return {}
    earlier = {
        (rank.rank, rank.pid, each.group): each.completed
        for rank in seen.before.inspection.ranks
        for each in rank.groups
    }
    found: dict[int, float] = {}
    for rank in seen.now.inspection.ranks:
        keys = [(each.completed, earlier.get((rank.rank, rank.pid, each.group))) for each in rank.groups]
        if known := [completed - was for completed, was in keys if was is not None]:
            found[rank.rank] = max(0, sum(known)) / seconds
    return found


def work(seen: Snapshot) -> dict[int, float]:
    """How many CPUs each rank kept busy between the two moments; of none where that is not known."""
    seconds = _seconds(seen)
    if seen.before is None or not seconds:
        return {}
    earlier = {(rank.rank, rank.pid): rank.cpu for rank in seen.before.inspection.ranks}
    found: dict[int, float] = {}
    for rank in seen.now.inspection.ranks:
        used, was = seen.now.used.get(rank.rank), seen.before.used.get(rank.rank)
        if used and was:
            found[rank.rank] = max(0.0, used.cpu - was.cpu) / seconds
        elif (rank.rank, rank.pid) in earlier:
            found[rank.rank] = max(0.0, rank.cpu - earlier[rank.rank, rank.pid]) / seconds
    return found
