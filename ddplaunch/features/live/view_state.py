"""State of the live view: snapshots of the job, the activity of each rank, rates and trends. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.errors import host_name, sanitize_line
from ddplaunch.core.control_socket.job_status import JobState, RankState, RankStatus, Status
from ddplaunch.observe.diagnosis.inspection import (
    GroupState,
    Inspection,
    ProcessCondition,
    ProgramInspection,
    RankInspection,
)
from ddplaunch.observe.diagnosis.rank_position import (
    UNRECORDED_FUNCTIONS,
    distributed_call_of,
    format_line,
    user_line_of,
)
from ddplaunch.observe.diagnosis.waits import mark_completed_operations
from ddplaunch.system.devices.gpu_usage import GpuUsage
from ddplaunch.system.devices.process_usage import ProcessUsage

_OWN_STOP_CODES = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}


class RankActivity(Enum):
    """What a rank does, with the word, sign, style and meaning that users see; the most important activity first."""

    FAILED = "failed", "X", "1;31", ""
    AWAITED = "awaited", "!", "1;31", "other ranks wait for it, and it does not"
    STOPPED = "stopped", "T", "1;35", "by SIGSTOP, Ctrl-Z or a debugger"
    SILENT = "silent", "?", "1;33", "does not answer: it holds Python's lock (GIL)"
    BLOCKED = "blocked", "D", "1;33", "waits for a disk or a driver, in the kernel"
    PENDING = "starting", "-", "2", "has no process yet"
    RUNNING = "running", ".", "32", "does not wait for another rank"
    WAITING = "waiting", "w", "33", "waits for other ranks, in a collective, a send or the like"
    ENDED = "ended", "e", "2", ""

    def __init__(self, word: str, sign: str, style: str, meaning: str) -> None:
        self.word, self.sign, self.style, self.meaning = word, sign, style, meaning


class WaitPoint(NamedTuple):
    """The collective, or the function of torch.distributed, in which a rank waits."""

    group: str
    number: int
    function: str = ""  # of torch.distributed, for calls without group and number


class JobSnapshot(Struct, frozen=True):
    """Status, inspection and usage of a job at one moment."""

    status: Status
    inspection: Inspection
    usage: Mapping[int, ProcessUsage] = field(default_factory=dict)  # by rank: those on this machine
    last_lines: Mapping[int, str] = field(default_factory=dict)  # of output, by rank


class ViewState(Struct, frozen=True):
    """The input for rendering a frame."""

    current: JobSnapshot
    previous: JobSnapshot | None = None  # for rates
    gpus: tuple[GpuUsage, ...] | None = ()  # those that the job uses; None where the driver does not answer
    sentences: tuple[str, ...] = ()  # who waits for whom, or who is slow
    awaited: frozenset[int] = frozenset()  # the ranks for which others wait, according to these sentences
    filter_text: str = ""  # the filter: "0,3-5", or a word of a rank's line
    hint: str = ""  # what the keys do
    locations: Mapping[int, str] = field(default_factory=dict)  # by rank: the user's line at the last stack inspection
    lateness_s: Mapping[int, float] = field(default_factory=dict)  # by rank: how much later it enters collectives
    trends: Mapping[str, TrendLine] = field(default_factory=dict)  # by metric
    sort_by: str = ""  # the column that sorts the table; "": by rank, or by state if there are many ranks
    cursor: int | None = None  # the chosen rank
    program_gpus: Mapping[str, tuple[GpuUsage, ...]] = field(default_factory=dict)  # by program: those on this machine
    suspended: bool = False  # whether a signal has stopped the job's launcher


class TrendLine:
    """A metric measured once a second; its resolution halves whenever ``MAX_POINTS`` is reached."""

    MAX_POINTS = 400

    def __init__(self) -> None:
        self.means: list[float] = []
        self._open: list[float] = []
        self._each = 1

    def seed(self, before: Iterable[tuple[float, float]]) -> None:
        """Begin with earlier measurements; each is (its duration in seconds, its value)."""
        known = [*before]
        while sum(seconds for seconds, _ in known) >= self._each * self.MAX_POINTS / 2:
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
        if len(self.means) >= self.MAX_POINTS:
            self.means = [(one + other) / 2 for one, other in zip(self.means[::2], self.means[1::2], strict=True)]
            self._each *= 2

    def render(self, width: int, top: float = 0.0) -> str:
        """Render all points as bars in ``width`` columns; a full bar is ``top``, or a larger value if there is one."""
        together = -(-len(self.means) // max(1, width)) or 1
        parts = [self.means[at : at + together] for at in range(0, len(self.means), together)]
        means = [sum(part) / len(part) for part in parts]
        top = max([top, *means]) or 1.0
        return "".join(_BAR_CHARS[min(7, int(8 * mean / top))] for mean in means)


_BAR_CHARS = "▁▂▃▄▅▆▇█"


def rank_activity(
    rank: RankInspection, status: RankStatus | None = None, state: JobState = JobState.RUNNING
) -> RankActivity:
    """Determine the activity of a rank from its inspection, its status and the job's state."""
    code = status.code if rank.code is None and status else rank.code
    if state is JobState.JOINING or (status and status.state is RankState.PENDING):
        return RankActivity.PENDING
    if status and status.state is RankState.UNABLE:
        return RankActivity.FAILED
    has_exited = rank.condition is ProcessCondition.EXITED or (status and status.state is RankState.EXITED)
    if state is JobState.ENDED or has_exited:
        was_stopped = state not in (JobState.STARTING, JobState.RUNNING) and code in _OWN_STOP_CODES
        return RankActivity.FAILED if code and not was_stopped else RankActivity.ENDED
    if rank.condition.name in ("PENDING", "STOPPED", "BLOCKED"):
        return RankActivity[rank.condition.name]
    if rank.answers is False:
        return RankActivity.SILENT
    return RankActivity.WAITING if find_wait_point(rank) else RankActivity.RUNNING


def find_wait_point(rank: RankInspection) -> WaitPoint | None:
    """Return the oldest collective or other call that a rank has entered and not left; None if it makes progress."""
    if rank.moved or rank.condition is not ProcessCondition.ALIVE:
        return None
    if rank.inside and (rank.inside.function in UNRECORDED_FUNCTIONS or not rank.groups):
        return WaitPoint("", 0, rank.inside.function)
    open_ones = [each for each in rank.groups if each.enqueued > each.completed]
    if not open_ones:
        return None
    found = max(open_ones, key=lambda each: each.completed)
    return WaitPoint(found.group, found.completed + 1)


def describe_location(rank: RankInspection) -> str:
    """Describe where a rank is in the program: "all_reduce train.py:88", "load_batch data.py:31"; "" without stack."""
    if (call := distributed_call_of(rank)) and call.place:
        return sanitize_line(f"{call.function} {format_line(call.place)}", 80)
    line = user_line_of(rank)
    if line is None:
        return ""
    function = "" if line.function == "<module>" else f"{line.function} "
    return sanitize_line(f"{function}{format_line(line)}", 80)


def correct_completed_counts(now: Inspection, before: Inspection | None) -> Inspection:
    """Increase the completed operations of ranks that do not wait, as far as this or the last inspection shows it."""
    earlier = {(rank.rank, rank.pid): rank.groups for rank in before.ranks} if before else {}

    def correct_group(state: GroupState, known: Iterable[GroupState]) -> GroupState:
        same = (each.completed for each in known if (each.group, each.enqueued) == (state.group, state.enqueued))
        return replace(state, completed=max(state.completed, *same, 0))

    ranks = (
        replace(rank, groups=tuple(correct_group(each, earlier.get((rank.rank, rank.pid), ())) for each in rank.groups))
        for rank in mark_completed_operations(now).ranks
    )
    return replace(now, ranks=tuple(ranks))


def mark_moved(now: Inspection, before: Inspection | None) -> Inspection:
    """Set ``moved`` of each rank by comparison with the previous inspection, if this one read the ranks only once."""
    if any(rank.moved or rank.threads for rank in now.ranks):
        return now
    earlier = {(rank.rank, rank.pid): rank.groups for rank in before.ranks} if before else {}
    ranks = (replace(rank, moved=rank.groups != earlier.get((rank.rank, rank.pid))) for rank in now.ranks)
    return replace(now, ranks=tuple(ranks))


def waiting_ranks(inspection: Inspection) -> frozenset[tuple[int, WaitPoint]]:
    """Return each rank that waits for others, and where."""
    return frozenset((rank.rank, where) for rank in inspection.ranks if (where := find_wait_point(rank)))


def rank_activities(view: ViewState) -> dict[int, RankActivity]:
    """Return the activity of each rank that passes the filter, by rank."""
    status, ranks = view.current.status, view.current.inspection.ranks
    known = {rank.rank: rank for rank in status.ranks}
    activities = {each.rank: rank_activity(each, known.get(each.rank), status.state) for each in ranks}
    for rank in view.awaited & activities.keys():
        if activities[rank] is RankActivity.RUNNING:
            activities[rank] = RankActivity.AWAITED
    if not view.filter_text:
        return activities
    about = {rank.rank: f"{activities[rank.rank].word} {rank.host}" for rank in ranks}
    return {rank: what for rank, what in activities.items() if _matches_filter(view.filter_text, rank, about[rank])}


def _matches_filter(filter: str, rank: int, about: str) -> bool:
    for part in filter.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            if int(first) <= rank <= int(last if dash else first):
                return True
        elif part and part.lower() in about.lower():
            return True
    return False


def _snapshot_interval_s(view: ViewState) -> float:
    """Return the seconds between the two snapshots; 0 if there is only one."""
    return max(0.0, view.current.inspection.moment - view.previous.inspection.moment) if view.previous else 0.0


def collectives_per_second(view: ViewState) -> float | None:
    """Return the collectives per second of the fastest rank; None if unknown."""
    return max(collectives_per_second_by_rank(view).values(), default=None)


def collectives_per_second_by_rank(view: ViewState) -> dict[int, float]:
    """Return the collectives per second of each rank for which it is known."""
    seconds = _snapshot_interval_s(view)
    if view.previous is None or not seconds:
        return {}
    earlier = {
        (rank.rank, rank.pid, each.group): each.completed
        for rank in view.previous.inspection.ranks
        for each in rank.groups
    }
    rates: dict[int, float] = {}
    for rank in view.current.inspection.ranks:
        keys = [(each.completed, earlier.get((rank.rank, rank.pid, each.group))) for each in rank.groups]
        if known := [completed - was for completed, was in keys if was is not None]:
            rates[rank.rank] = max(0, sum(known)) / seconds
    return rates


def busy_cpus_by_rank(view: ViewState) -> dict[int, float]:
    """Return the number of CPUs that each rank kept busy between the two snapshots, for ranks where it is known."""
    seconds = _snapshot_interval_s(view)
    if view.previous is None or not seconds:
        return {}
    earlier = {(rank.rank, rank.pid): rank.cpu for rank in view.previous.inspection.ranks}
    cpus: dict[int, float] = {}
    for rank in view.current.inspection.ranks:
        used, was = view.current.usage.get(rank.rank), view.previous.usage.get(rank.rank)
        if used and was:
            cpus[rank.rank] = max(0.0, used.cpu - was.cpu) / seconds
        elif (rank.rank, rank.pid) in earlier:
            cpus[rank.rank] = max(0.0, rank.cpu - earlier[rank.rank, rank.pid]) / seconds
    return cpus


def find_program_gpus(
    programs: Iterable[ProgramInspection], gpus: Iterable[GpuUsage]
) -> dict[str, tuple[GpuUsage, ...]]:
    """Return the usage of the GPUs of each program on this machine."""
    known = [*gpus]
    here = [each for each in programs if each.gpus and each.host == host_name()]
    return {each.program: tuple(gpu for gpu in known if each.has_gpu(gpu.gpu)) for each in here}
