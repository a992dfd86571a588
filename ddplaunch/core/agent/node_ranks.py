"""The processes of this node's ranks in one attempt, and their channels."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

from msgspec import Struct

from ddplaunch.base.event_loop import EventLoop, Timers
from ddplaunch.core.agent.crash_socket import CrashSocket
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.core.agent.run_temp_dir import RunTempDir
from ddplaunch.core.node.node_attempt import AttemptView
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.plan.rank_layout import Rank
from ddplaunch.system.processes import proc_utils


class RankProcess(Struct):
    """The process of one rank."""

    rank: Rank
    pid: int
    pidfd: int | None

    def stop(self, number: int) -> None:
        """Send the process a signal that ends it, then SIGCONT: a suspended process handles no signal."""
        self.send(number)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        proc_utils.send_signal(self.pid, number, self.pidfd)


class NodeRanks:
    """All ranks of this node, from the order to start to the attempt report."""

    def __init__(self, attempt: AttemptView, plan: Plan, loop: EventLoop, folder: RunTempDir) -> None:
        """``attempt``: a read-only view of the attempt, for features; ``folder``: where ranks write files."""
        self.attempt, self.plan = attempt, plan
        self.number = attempt.number  # 0 is the first, -1 none yet
        self.timers = Timers(loop.call_later)  # cancelled once no rank is left
        self.processes: dict[int, RankProcess] = {}  # by rank, those alive
        self.channels: dict[int, RankChannel] = {}  # by rank, those that answer requests
        self._crash_sockets: dict[int, CrashSocket] = {}  # by rank
        self.on_crash: Callable[[int], None] = self.release_crashed  # native code failed in a rank, which waits
        self.on_crash_output: Callable[[int, bytes], None] = lambda rank, data: None
        self.exit_codes: dict[int, int] = {}  # by rank, of those that have ended: -N for signal N
        self.ends: dict[int, float] = {}  # when their ends were seen, in seconds since the epoch
        self.on_failed: Callable[[int, str], None] = lambda rank, what: None  # a program ended by this exception
        self.on_mismatch: Callable[[int, str, str, str], None] = lambda *_: None  # as of ``RankChannel``
        self.has_only_printed: Callable[[int, int], bool] = lambda rank, written: False
        self.is_holding = False  # whether one of them waits for a user: time limits are paused
        self.on_hold_changed: Callable[[], object] = lambda: None
        self._loop, self._folder = loop, folder

    def is_stop_requested(self, rank: int) -> bool:
        """Whether the launcher has sent a live rank a signal to end."""
        return self.attempt.is_stop_requested(rank)

    def rank_file_path(self, rank: int, kind: str) -> str | None:
        """The path of a rank's file in this attempt; ``kind``: "json" (exception), "trace.json" (last collectives)."""
        folder = self._folder.path
        return os.path.join(folder, f"{rank}.{self.number}.{kind}") if folder else None

    def last_keep_alive_at(self, rank: int) -> float:
        """When the rank last called ``runtime.working``, on the monotonic clock; 0.0 if never."""
        folder = self._folder.path
        try:
            return os.stat(os.path.join(folder, f"working.{rank}")).st_mtime if folder else 0.0
        except OSError:
            return 0.0

    def open_channel(self, rank: int) -> int:
        """Open the channel of a rank; return the rank's end. OSError: too many files are open."""
        channel = self.channels[rank] = RankChannel(
            self._loop,
            lambda what: self.on_failed(rank, what),
            lambda outcome, module, differs: self.on_mismatch(rank, outcome, module, differs),
            lambda written: self.has_only_printed(rank, written),
        )
        return channel.rank_fd

    def open_crash_socket(self, rank: int) -> int:
        """Open the crash socket of a rank; return the rank's end. OSError: too many files are open."""
        crash_socket = self._crash_sockets[rank] = CrashSocket(
            self._loop, lambda: self.on_crash(rank), lambda data: self.on_crash_output(rank, data)
        )
        return crash_socket.rank_fd

    def release_crashed(self, rank: int) -> None:
        """Let a rank in which native code has failed go on to its end."""
        if rank in self._crash_sockets:
            self._crash_sockets[rank].release()

    def read_crash_output(self, rank: int) -> None:
        """Read the rest of the stacks that faulthandler has written in a rank that has ended."""
        if rank in self._crash_sockets:
            self._crash_sockets[rank].read_pending()

    def set_waits_for_user(self, is_holding: bool) -> None:
        """Set whether a rank of this node waits for a user."""
        self.is_holding = is_holding
        self.on_hold_changed()

    def add_process(self, rank: int, pid: int, pidfd: int | None) -> None:
        self.processes[rank] = RankProcess(self.plan.rank_of(rank), pid, pidfd)

    def remove_process(self, rank: int, pid: int, code: int) -> None:
        """Remove the process of a rank; ignore one of an earlier attempt, in which it could not be killed."""
        if rank not in self.processes or self.processes[rank].pid != pid:
            return
        process = self.processes.pop(rank)
        self.exit_codes[rank], self.ends[rank] = code, time.time()
        if process.pidfd is not None:
            os.close(process.pidfd)

    def is_signal_handled(self, number: int) -> bool:
        """Whether a rank has a handler for this signal."""
        return any(self._has_handler(rank, number) for rank in self.processes)

    def _has_handler(self, rank: int, number: int) -> bool:
        """Whether a rank has a handler of its own for this signal, not one inherited from the zygote.

        A fork of the zygote blocks these signals until it has removed the zygote's handlers, so the blocked signals
        are read first.
        """
        pid, channel = self.processes[rank].pid, self.channels.get(rank)
        has_begun = (channel is not None and channel.is_ready) or not proc_utils.blocks_forwarded_signals(pid)
        return has_begun and proc_utils.catches_signal(pid, number)

    def forward_signal(self, number: int, *, only_handlers: bool, except_pids: Collection[int] = ()) -> set[int]:
        """Send a signal to all ranks; ``only_handlers``: to ranks that handle it, unless the launcher uses it there.

        Returns the pids of the ranks that have got it.
        """
        sent = set[int]()
        for rank, process in self.processes.items():
            if process.pid in except_pids:
                continue
            if only_handlers and (channel := self.channels.get(rank)):
                channel.read_pending()
                if number in channel.reserved_signals:
                    continue
            if not only_handlers or self._has_handler(rank, number):
                process.send(number)
                sent.add(process.pid)
        return sent

    def suspend(self) -> None:
        """Suspend the ranks and then the launcher (Ctrl-Z); continue the ranks when the launcher continues."""
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

    def forget_processes(self) -> None:
        """Forget the processes of all ranks. If any are left, they cannot be killed."""
        self.timers.cancel_all()
        for process in self.processes.values():
            if process.pidfd is not None:
                os.close(process.pidfd)
        self.processes.clear()

    def close(self) -> None:
        """Close the channels."""
        self.timers.cancel_all()
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        for crash_socket in self._crash_sockets.values():
            crash_socket.close()
        self._crash_sockets.clear()
