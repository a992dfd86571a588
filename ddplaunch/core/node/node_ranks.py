"""The ranks of this node in one attempt: their processes, phase, channels, failures and exit codes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_OS
from ddplaunch.base.event_loop import EventLoop, Timers
from ddplaunch.core.failures import MAX_REPORT_CHARS, RankFailure
from ddplaunch.core.messages import AttemptReport, LauncherFailure
from ddplaunch.core.node import process_limits, rank_files
from ddplaunch.core.node.launcher_signals import is_caught
from ddplaunch.core.node.rank_channel import RankChannel
from ddplaunch.core.node.run_temp_dir import RunTempDir
from ddplaunch.core.output.streams import REPORTED, Streams
from ddplaunch.core.rank import proc_utils
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import Rank

SIGINT_TIMEOUT_S = 3.0  # seconds between SIGINT and SIGTERM: a wait inside torch does not react to SIGINT


class AttemptPhase(Enum):
    """The phase of an attempt on this node."""

    WAITING = "idle, waiting for the coordinator"
    LOADING = "ranks are requested, and the zygote is importing"
    RUNNING = "ranks are running"
    STOPPING = "ranks have got a signal to stop"
    SWEEPING = "leftover processes are being killed"
    DRAINING = "the last output is being read"
    ENDED = "the job is over"


ATTEMPT_PHASE_TRANSITIONS = {
    AttemptPhase.WAITING: {AttemptPhase.LOADING, AttemptPhase.RUNNING, AttemptPhase.ENDED},
    AttemptPhase.LOADING: {AttemptPhase.RUNNING, AttemptPhase.DRAINING},
    AttemptPhase.RUNNING: {AttemptPhase.STOPPING, AttemptPhase.SWEEPING, AttemptPhase.DRAINING},
    AttemptPhase.STOPPING: {AttemptPhase.SWEEPING, AttemptPhase.DRAINING},
    AttemptPhase.SWEEPING: {AttemptPhase.DRAINING},
    AttemptPhase.DRAINING: {AttemptPhase.WAITING, AttemptPhase.ENDED},
    AttemptPhase.ENDED: set(),
}


class RankProcess(Struct):
    """The process of one rank; ``stop_requested``: the launcher has sent it a signal to end."""

    rank: Rank
    pid: int
    pidfd: int | None
    stop_requested: bool = False

    def stop(self, number: int) -> None:
        """Send a signal to end, and SIGCONT: a stopped process handles no signal."""
        self.stop_requested = True
        self.send(number)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        proc_utils.send_signal(self.pid, number, self.pidfd)


class NodeRanks:
    """All ranks of this node, from the order to start to the attempt report."""

    def __init__(
        self,
        attempt: int,
        plan: Plan,
        loop: EventLoop,
        folder: RunTempDir,
        explain_failure: Callable[[RankFailure, int], str | None],
        find_exception: Callable[[int], tuple[str, str] | None],
    ) -> None:
        """``folder``: where ranks write error files; ``explain_failure`` returns the hint for the failure of a rank.

        ``find_exception`` returns message and traceback of the exception that a rank is handling, and that will end it.
        """
        self.number, self.plan = attempt, plan  # number of the attempt: 0 is the first, -1 none yet
        self.phase = AttemptPhase.WAITING
        self.timers = Timers(loop.call_later)  # cancelled once no rank is left
        self.processes: dict[int, RankProcess] = {}  # by rank, those alive
        self.channels: dict[int, RankChannel] = {}  # by rank, those that answer requests
        self.exit_codes: dict[int, int] = {}  # by rank, of those that have ended: -N for signal N
        self.ends: dict[int, float] = {}  # when their ends were seen, in seconds since the epoch
        self.not_spawned = 0  # requested, no process yet
        self.failures: list[RankFailure] = []  # not those that were stopped
        self.stopped_count = 0  # how many ended because of a stop signal
        self.stop_signals: set[int] = set()  # the stop signals sent so far
        self.spawned_count = 0  # how many have had a process
        self.on_failed: Callable[[int, str], None] = lambda rank, what: None  # a program ended by this exception
        self.is_holding = False  # whether one of them waits for a user: time limits are paused
        self.on_hold_changed: Callable[[], object] = lambda: None
        self._launcher_failure: LauncherFailure | None = None
        self._loop, self._folder = loop, folder
        self._explain_failure, self._find_exception = explain_failure, find_exception

    def set_phase(self, phase: AttemptPhase) -> None:
        assert phase in ATTEMPT_PHASE_TRANSITIONS[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def rank_file_path(self, rank: int, kind: str) -> str | None:
        """The file that a rank writes in this attempt: "json" its exception, "trace.json" its last collectives."""
        folder = self._folder.path
        return os.path.join(folder, f"{rank}.{self.number}.{kind}") if folder else None

    def last_keep_alive(self, rank: int) -> float:
        """When the rank last called ``runtime.working``, on the monotonic clock; 0.0 if never."""
        folder = self._folder.path
        try:
            return os.stat(os.path.join(folder, f"working.{rank}")).st_mtime if folder else 0.0
        except OSError:
            return 0.0

    def open_channel(self, rank: int) -> int:
        """Open the channel of a rank; return the rank's end. OSError: too many files are open."""
        channel = self.channels[rank] = RankChannel(self._loop, lambda what: self.on_failed(rank, what))
        return channel.rank_fd

    def set_holding(self, is_holding: bool) -> None:
        """Set whether one of them waits for a user."""
        self.is_holding = is_holding
        self.on_hold_changed()

    @property
    def is_idle(self) -> bool:
        return not self.not_spawned and not self.processes

    def add_process(self, number: int, pid: int, pidfd: int | None) -> RankProcess:
        self.not_spawned -= 1
        self.spawned_count += 1
        process = self.processes[number] = RankProcess(self.plan.rank_of(number), pid, pidfd)
        return process

    def remove_process(self, rank: int, pid: int, code: int) -> RankProcess | None:
        """Remove the process of a rank; None if it belongs to an earlier attempt, where it could not be killed."""
        if rank not in self.processes or self.processes[rank].pid != pid:
            return None
        process = self.processes.pop(rank)
        self.exit_codes[rank], self.ends[rank] = code, time.time()
        if process.pidfd is not None:
            os.close(process.pidfd)
        return process

    def to_failure(self, process: RankProcess, code: int, peak: int = 0) -> RankFailure | None:
        """Return the failure of a rank, None if it ended because of a stop signal.

        ``code``: -N for signal N; ``peak``: most memory that it used, in bytes.
        """
        rank, stopped = process.rank, process.stop_requested
        # Of a stopped rank, the exception came first; the signal only interrupted its cleanup.
        failure = self._make_failure(rank, process.pid, 1 if stopped else code)
        recorded = rank_files.read_exception(self.rank_file_path(rank.rank, "json"), failure, stopped=stopped)
        if recorded is None and stopped:  # perhaps killed in a ``finally`` that took longer than the grace
            if (found := self._find_exception(rank.rank)) is None:
                self.stopped_count += 1
                return None
            recorded = replace(failure, message=found[0], traceback=found[1])
        return self._add_failure(recorded or failure, peak)

    def spawn_failure(self, number: int, errno: int) -> RankFailure | None:
        """Return the failure of a rank that got no process or no descriptors; None after the first such rank."""
        self.not_spawned -= 1
        if any(not failure.pid for failure in self.failures):
            return None
        total = len(self.plan.local_ranks)
        before = f"; {self.spawned_count} of {total} ranks had been started here" if total > 1 else ""
        message = f"rank {number} could not be started: {process_limits.describe_spawn_error(errno)}{before}"
        return self._add_failure(replace(self._make_failure(self.plan.rank_of(number), 0, EXIT_OS), message=message))

    def _make_failure(self, rank: Rank, pid: int, code: int) -> RankFailure:
        """Make the failure of a rank without an exception."""
        return RankFailure(
            rank=rank.rank,
            local_rank=rank.local_rank,
            host=rank.host or "",
            pid=pid,
            attempt=self.number,
            exit_code=None if code < 0 else code,
            signal=-code if code < 0 else None,
            message=None,
            traceback=None,
            moment=time.time(),
            hint=None,
        )

    def _add_failure(self, failure: RankFailure, peak: int = 0) -> RankFailure:
        hint = failure.hint or self._explain_failure(failure, peak) or rank_files.signal_hint(failure.signal)
        self.failures.append(failure := replace(failure, hint=hint))
        return failure

    def stop(self, number: int, *, spares_failing: bool = False) -> None:
        """Send a stop signal to the ranks, not to their process groups.

        A DataLoader's workers must live while a checkpoint is written. ``spares_failing``: a rank that is handling an
        exception gets no signal; it may clean up and end by itself within the grace.
        """
        self.stop_signals.add(number)
        if number != signal.SIGTERM:
            self.timers.call_later(SIGINT_TIMEOUT_S, lambda: self._send_stop(signal.SIGTERM))
        self._send_stop(number, spares_failing=spares_failing)

    def _send_stop(self, number: int, *, spares_failing: bool = False) -> None:
        for process in self.processes.values():
            if not (spares_failing and self._find_exception(process.rank.rank)):
                process.stop(number)

    def signal_all(self, number: int) -> None:
        for process in self.processes.values():
            process.send(number)

    def any_catches(self, number: int) -> bool:
        """Whether a rank has a handler for this signal."""
        return any(is_caught(process.pid, number) for process in self.processes.values())

    def forward_signal(self, number: int) -> None:
        """Send a signal to the ranks that catch it, which would end others; not one that the launcher uses itself."""
        for rank, process in self.processes.items():
            if channel := self.channels.get(rank):
                channel.read_pending()
            taken = channel.reserved_signals if channel else ()
            if number not in taken and is_caught(process.pid, number):
                process.send(number)

    def suspend(self) -> None:
        """Stop and continue the ranks with the launcher (Ctrl-Z): they are in sessions of their own."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in self.processes.values():
                try:
                    os.killpg(process.pid, number)
                except (ProcessLookupError, PermissionError):
                    process.send(number)
            if number == signal.SIGSTOP:
                before = signal.signal(signal.SIGCONT, signal.SIG_IGN)  # it resumes the launcher, and is not for ranks
                os.kill(os.getpid(), signal.SIGSTOP)
                signal.signal(signal.SIGCONT, before)

    def mark_stopped(self) -> None:
        """From now on, no end of a rank is a failure."""
        for process in self.processes.values():
            process.stop_requested = True

    def set_launcher_failure(self, how: str) -> None:
        """A process of the launcher that the ranks depend on has ended: the zygote or the store."""
        self._launcher_failure = self._launcher_failure or LauncherFailure(how, time.time())

    def on_zygote_lost(self, how: str | None) -> list[RankFailure]:
        """The ranks ended with their zygote; return the failures of those that had recorded an exception.

        ``how``: from ``ProcessTree.close``.
        """
        if how:
            self.set_launcher_failure(how)
        self.mark_stopped()
        ended = [self.to_failure(process, -signal.SIGKILL) for process in self.processes.values()]
        self.processes.clear()
        self.not_spawned = 0
        return [failure for failure in ended if failure is not None]

    def close(self) -> None:
        """Close the channels; no process is left."""
        self.timers.cancel_all()
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def build_report(self, streams: Streams, *, seen: bool) -> AttemptReport:
        """Build this node's final message of the attempt, with the last lines that each failed rank printed."""
        tails, chars = [], 0
        for rank in (failure.rank for failure in self.failures):
            lines = rank_files.last_lines(streams.tail(rank, REPORTED))
            chars += sum(map(len, lines))
            if lines and chars <= MAX_REPORT_CHARS:
                tails.append((rank, lines))
        return AttemptReport(self.number, self.stopped_count, time.time(), self._launcher_failure, seen, tuple(tails))
