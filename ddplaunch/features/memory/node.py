"""Memory of this node's ranks: samples it when it gets short, and finds out which process the OOM killer killed.

``memory_report`` turns the findings into text.
"""

from __future__ import annotations

import _thread
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.base.errors import MAX_LINE_CHARS, sanitize_line
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.safe_files import current_folder, read_regular_file
from ddplaunch.base.text import format_size
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.rank_files import MAX_ERROR_FILE_BYTES
from ddplaunch.core.events import AttemptSwept, Event, RankStarted
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import FeatureContext, NodeSide, RankSide
from ddplaunch.core.output.run_log import attempt_suffix
from ddplaunch.features.memory.memory_alarm import MAX_QUIET_S, MemoryAlarm
from ddplaunch.features.memory.memory_report import MemoryLimit, MemoryPoint, OutOfMemory, describe_growth, explain_oom
from ddplaunch.features.memory.options import MemoryReport
from ddplaunch.observe.samples.node import SampleCollector
from ddplaunch.system.devices import cgroups
from ddplaunch.system.plan.rank_layout import Rank

PointsByRank = dict[int, deque[MemoryPoint]]

_PSS_TIMEOUT_S = 0.3  # for reading proportional sizes (PSS) of all ranks
_PSS_TIMEOUT_BYTES = 10 << 30  # what the kernel can sum up in this time; alarms are frequent, as caches fill limits
_OWN_PEAK_FACTOR = 1.25  # times the memory of a killed child: a larger peak is that of the rank itself
_MAX_POINTS = 32  # of a rank
_OOM_REASON = re.compile(
    r"oom-kill:con.*?(?:oom_memcg=(?P<limited>[^,]*),)?task_memcg=(?P<of>[^,]*),.*,pid=(?P<pid>\d+)"
)
_OOM_VICTIM = re.compile(r"Killed process (\d+) .*anon-rss:(\d+)kB, file-rss:\d+kB, shmem-rss:(\d+)kB")  # mm/oom_kill.c
_PIDS = re.compile(r"\(pid\(?s?\)? ([\d, ]+)\)")  # of a DataLoader's workers: torch/utils/data/dataloader.py
_WORKER_KILLED = re.compile(
    r"killed by signal: Killed|torch/utils/data/dataloader\.py(?s:.*)(?:exited unexpectedly"
    r"|(?m:^(?:EOFError|ConnectionResetError|BrokenPipeError)))"
)
"""How a rank fails when a worker of its DataLoader was killed: at times with no more than an EOFError."""
_INIT_PID_NAMESPACE = 0xEFFFFFFC  # inode of the first PID namespace, whose pids are in the kernel log (proc_ns.h)


class MemorySide(NodeSide):
    """The node side of the feature: explains a rank that ended because GPU or host memory ran out."""

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        if samples := context.find(SampleCollector):
            samples.add_listener(context.loop.guard(self._on_sample))
        self._ranks: NodeRanks | None = None
        self._memory: RankMemory | None = None  # of this attempt, once a rank has been spawned

    def on_attempt_start(self, ranks: NodeRanks) -> None:
        self._ranks, self._memory = ranks, None

    def observe(self, event: Event) -> None:
        if isinstance(event, RankStarted) and self._memory is None:
            self._memory = RankMemory(self._context.loop, self._list_pids)
            self._memory.start_alarm()
        elif isinstance(event, AttemptSwept):
            self.close()

    def make_rank_side(self, ranks: NodeRanks, rank: Rank) -> RankSide | None:
        if not self._context.options[MemoryReport].oom_report:
            return None
        name = f"rank-{rank.rank}{attempt_suffix(ranks.number)}.oom.pickle"
        snapshot = self._context.log.file(name) or os.path.join(current_folder(), f"{ranks.plan.run_id}.{name}")
        summary = ranks.rank_file_path(rank.rank, "oom") or ""
        return RankSide("features/memory/rank/oom_report", {"snapshot": snapshot, "summary": summary})

    def _list_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._ranks.processes.items()} if self._ranks else {}

    def _on_sample(self) -> None:
        """Called on each sample: store the memory of the ranks, in case one runs out of memory later."""
        if self._memory:
            self._memory.sample()

    def explain_failure(self, failure: RankFailure, peak_bytes: int) -> str | None:
        path = self._ranks.rank_file_path(failure.rank, "oom") if self._ranks else None
        text = failure.exception_text
        if of_gpu := read_oom_summary(path, text):
            return of_gpu
        memory, number = self._memory, failure.signal or 0
        return memory.explain_kill(number, text, failure.rank, failure.pid, peak_bytes) if memory else None

    def close(self) -> None:
        if self._memory:
            self._memory.close()


def read_oom_summary(path: str | None, exception_text: str) -> str | None:
    """Read what ``oom_report.py`` wrote about CUDA memory; None unless the exception is an OutOfMemoryError."""
    if path is None or "OutOfMemoryError" not in exception_text:
        return None
    try:
        summary = read_regular_file(path, MAX_ERROR_FILE_BYTES, follow_symlinks=False).decode(errors="replace")
    except OSError:
        return None
    return "\n".join(sanitize_line(line, MAX_LINE_CHARS) for line in summary.splitlines()[:4]) or None


class RankMemory:
    """The memory of the ranks in one attempt: samples it from the first spawn on, and explains kills."""

    def __init__(self, loop: EventLoop, ranks: Callable[[], Mapping[int, int]], root: str = "") -> None:
        """``ranks`` returns the pids of the ranks alive; ``root``: the folder with /proc and /sys."""
        self._loop, self._ranks, self._root = loop, ranks, root
        self._before = cgroups.read_cgroups(root)
        self._machine = self._read_oom_kill_count()
        self._log = KernelLog(root)
        self._pss_points: PointsByRank = {}  # when memory was short: proportional sizes, forks share pages
        self._rss_points: PointsByRank = {}  # at any time: resident sizes
        self._explained: set[int] = set()  # pids whose kill was reported
        self._alarm: MemoryAlarm | None = None
        self._pss_lock = _thread.allocate_lock()  # held by the thread that reads proportional sizes

    def start_alarm(self) -> None:
        """From now on, sample the ranks whenever memory gets short."""
        with suppress(OSError):
            self._alarm = MemoryAlarm(self._loop, self._before, self._on_alarm, self._root)

    def close(self) -> None:
        self._log.close()
        if self._alarm:
            self._alarm.close()
            self._alarm = None

    def explain_kill(self, number: int, text: str, rank: int, pid: int, peak: int) -> str | None:
        """Explain an end by signal ``number``, or an exception ``text`` about a killed child, if memory was the reason.

        ``peak``: most memory that the process or one of its children used, in bytes.
        """
        if number == signal.SIGBUS or "Bus error" in text:
            points = [*self._rss_points.get(rank, ()), self._sample_ranks({rank: pid}, proportional=False)[rank]]
            grew = describe_growth(rank, points)
            return "\n".join(filter(None, (_describe_shared_memory(), grew)))
        if number == signal.SIGKILL:
            return self._explain_oom_kill(rank, pid, [pid], peak)
        if _WORKER_KILLED.search(text):
            named = [int(each) for found in _PIDS.findall(text) for each in re.findall(r"[0-9]{1,9}", found)]
            unexplained = [
                each
                for each, kill in self._log.read_kills().items()
                if each not in self._explained and self._is_in_our_cgroup(kill)
            ]
            return self._explain_oom_kill(rank, pid, named or unexplained, peak)
        return None

    def _is_in_our_cgroup(self, killed: OomKill) -> bool:
        """Whether the killed process was in this job's control group or a descendant of it."""
        name = self._before[0].name if self._before else "/"
        return killed.cgroup is not None and f"{killed.cgroup}/".startswith(f"{name.rstrip('/')}/")

    def _explain_oom_kill(self, rank: int, pid: int, pids: Sequence[int], peak: int) -> str | None:
        """Explain why one of ``pids`` was killed, the rank ``pid`` or its workers; None if memory was not short."""
        now, ended = cgroups.read_cgroups(self._root), self._log.read_kills()
        before, after = (each[0].oom_kills if each else None for each in (self._before, now))
        is_certain = before is not None and after is not None
        if before is None or after is None:
            before, after = self._machine, self._read_oom_kill_count()
        victim = next((each for each in pids if each in ended), None)
        accounted = sum(map(self._is_in_our_cgroup, ended.values()))  # each of them another process
        if victim is None and after - before <= (accounted if self._log.is_complete else 0):
            return None
        record = ended[victim] if victim else None
        self._explained.add(victim or 0)
        itself = pids == [pid]
        if record and not itself:
            who = f"its process {victim}, which had {format_size(record.anonymous_bytes)}"
        else:
            who = "" if itself else "one of its processes"
        ranks = {**self._ranks(), rank: pid}
        others = ranks.keys() - {rank}
        resident, proportional = self._sample_ranks(ranks, proportional=False), self._sample_ranks(ranks)
        for each in resident:
            proportional.setdefault(each, self._pss_points[each][-1] if each in self._pss_points else resident[each])
        held = sum(
            self._recent_peak(self._pss_points, other, proportional[other], of)
            for other in others
            for of in ("own", "children")
        )
        shortage = OutOfMemory(
            rank,
            self._find_exhausted_limit(now, record),
            before,
            after,
            is_certain or record is not None,
            who,
            len(others),
            held,
        )
        both = [
            [*noted.get(rank, ()), self._point_before_kill(noted, rank, seen[rank], record, peak, itself=itself)]
            for noted, seen in ((self._pss_points, proportional), (self._rss_points, resident))
        ]
        return "\n".join(explain_oom(shortage, *both))

    def _point_before_kill(
        self, noted: PointsByRank, rank: int, now: MemoryPoint, record: OomKill | None, peak: int, *, itself: bool
    ) -> MemoryPoint:
        """Return the memory of a rank when one of its processes was killed: by now much of it is free."""
        own, children, shared = (self._recent_peak(noted, rank, now, of) for of in ("own", "children", "shared"))
        if itself:
            own, shared = (record.anonymous_bytes, max(shared, record.shared)) if record else (max(own, peak), shared)
        else:
            held = record.anonymous_bytes if record else peak
            children = max(children, now.children + held)
            # The kernel has one peak for a process and the children it waited for: the largest, here the child's.
            own = own or (peak if peak > _OWN_PEAK_FACTOR * held else 0)
        return MemoryPoint(now.moment, own, children, shared, now.cache)

    def _recent_peak(self, noted: PointsByRank, rank: int, now: MemoryPoint, of: str) -> int:
        """Return the largest value of the field ``of`` of a rank's memory, now and shortly before."""
        points = [*noted.get(rank, ())]
        recent = [each for each in points if each.moment > now.moment - MAX_QUIET_S] or points[-1:]
        most: int = max(getattr(each, of) for each in [now, *recent])
        return most

    def _find_exhausted_limit(self, now: Sequence[cgroups.Cgroup], record: OomKill | None) -> MemoryLimit:
        """Return the limit that was reached: by the kernel log, else the innermost one reached, else the machine's."""
        met = {each.path: each.limit_hits for each in self._before}
        for cgroup in now:
            named = (
                cgroup.name == record.limited_cgroup
                if record and record.cgroup
                else cgroup.limit_hits > met.get(cgroup.path, 0)
            )
            if cgroup.limit is not None and named:
                return MemoryLimit(cgroup.limit, cgroup.name, cgroup.setting)
        total = cgroups.read_counters(f"{self._root}/proc/meminfo").get("MemTotal", 0)
        return MemoryLimit(total << 10)

    def _read_oom_kill_count(self) -> int:
        return cgroups.read_counters(f"{self._root}/proc/vmstat").get("oom_kill", 0)

    def sample(self) -> None:
        """Store the resident sizes of the ranks; this is fast, and does not lock their memory maps."""
        self._store_points(self._rss_points, self._sample_ranks(self._ranks(), proportional=False))

    def _on_alarm(self) -> None:
        self.sample()
        self._store_points(self._pss_points, self._sample_ranks(self._ranks()))

    def _store_points(self, noted: PointsByRank, seen: Mapping[int, MemoryPoint]) -> None:
        for rank, point in seen.items():
            if point.own:  # else it has just ended, or no descriptor is left for reading
                noted.setdefault(rank, deque(maxlen=_MAX_POINTS)).append(point)

    def _sample_ranks(self, ranks: Mapping[int, int], *, proportional: bool = True) -> dict[int, MemoryPoint]:
        """Return the memory of ranks, given their pids; of a rank that has ended, the memory of its children.

        ``proportional``: proportional sizes (forks share pages), empty if that takes too long; else resident sizes.
        """
        if self._before:
            shared, cache = cgroups.read_shared_and_cache(self._before[0])
        else:
            shared, cache = cgroups.read_counters(f"{self._root}/proc/meminfo").get("Shmem", 0) << 10, None
        leaders: dict[int, int] = {}
        with suppress(OSError):  # no descriptor is left
            for name in filter(str.isdecimal, os.listdir("/proc")):
                with suppress(OSError):
                    leaders[int(name)] = os.getsid(int(name))  # each rank leads a session, which its workers are in
        own, below = dict.fromkeys(ranks.values(), 0), dict.fromkeys(ranks.values(), 0)
        pids = [pid for pid, leader in leaders.items() if leader in own]
        held = (
            self._read_proportional_sizes(pids)
            if proportional
            else {pid: _read_counter_bytes(pid, "status", "RssAnon") for pid in pids}
        )
        if len(held) < len(pids):
            return {}
        for pid, count in held.items():
            (own if leaders[pid] == pid else below)[leaders[pid]] += count
        point = MemoryPoint
        return {rank: point(time.time(), own[pid], below[pid], shared, cache) for rank, pid in ranks.items()}

    def _read_proportional_sizes(self, pids: Sequence[int]) -> dict[int, int]:
        """Read the proportional anonymous memory of processes; incomplete after ``_PSS_TIMEOUT_S``."""
        sizes: dict[int, int] = {}

        def read_sizes() -> None:
            try:
                for pid in pids:
                    sizes[pid] = _read_counter_bytes(pid, "smaps_rollup", "Pss_Anon")
            finally:
                self._pss_lock.release()

        # The reader waits for a process that is changing its memory map: only one thread at a time, not the loop.
        much = sum(_read_counter_bytes(pid, "status", "VmRSS") for pid in pids) > _PSS_TIMEOUT_BYTES
        if much or not self._pss_lock.acquire(blocking=False):
            return {}
        try:
            _thread.start_new_thread(read_sizes, ())
        except RuntimeError:  # too many processes
            self._pss_lock.release()
        if self._pss_lock.acquire(timeout=_PSS_TIMEOUT_S):
            self._pss_lock.release()
        return dict(sizes) if any(sizes.values()) else {}  # kernels before 5.4 have no Pss_Anon


def _read_counter_bytes(pid: int, file: str, field: str) -> int:
    return cgroups.read_counters(f"/proc/{pid}/{file}").get(field, 0) << 10


def _describe_shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return "DataLoader workers need /dev/shm, which does not exist here"
    total, free = (blocks * found.f_frsize >> 20 for blocks in (found.f_blocks, found.f_bavail))
    return (
        f"/dev/shm, which DataLoader workers need, has {free} of {total} MiB free now: "
        "make it larger (docker run --shm-size=8g), or use num_workers=0"
    )


class OomKill(Struct, frozen=True):
    """A kill by the OOM killer, from the kernel log."""

    anonymous_bytes: int  # memory not backed by files
    shared: int  # bytes of shared memory
    cgroup: str | None  # its control group; None if several were killed at once, and the log does not have it
    limited_cgroup: str | None  # the group whose limit was reached; None: the machine's memory


class KernelLog:
    """Reads OOM kills from the kernel log (/dev/kmsg) from now on, if that is permitted."""

    def __init__(self, root: str = "") -> None:
        self._file = -1
        self._groups: dict[int, tuple[str, str | None]] = {}
        self._ended: dict[int, OomKill] = {}
        with suppress(OSError):
            # In another namespace, pids and control groups differ from those in the log.
            if os.stat("/proc/self/ns/pid").st_ino == _INIT_PID_NAMESPACE:
                self._file = os.open(f"{root}/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._file, 0, os.SEEK_END)
        self.is_complete = self._file >= 0  # whether every kill is in it

    def read_kills(self) -> dict[int, OomKill]:
        """Return the kills so far, by pid."""
        while self._file >= 0:
            try:
                record = os.read(self._file, 8192).decode(errors="replace")  # one record per read
            except BrokenPipeError:  # records were overwritten before they were read
                self.is_complete = False
            except OSError:
                break
            else:
                if not record:
                    break
                if found := _OOM_REASON.search(record):
                    self._groups[int(found["pid"])] = found["of"], found["limited"]
                elif found := _OOM_VICTIM.search(record):
                    pid, own, shared = map(int, found.groups())
                    self._ended[pid] = OomKill(own << 10, shared << 10, *self._groups.get(pid, (None, None)))
        return self._ended

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
