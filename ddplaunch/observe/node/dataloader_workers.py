"""Stacks of the child processes that a rank waits for: the workers of its DataLoader, or of multiprocessing.

A forked worker has inherited the rank's signal handlers and its file for stack dumps. As all workers write to that one
file, they are dumped one after the other. A new interpreter has its own (``rank/spawned_children.py``).
"""

from __future__ import annotations

import os
import time
from itertools import takewhile

from ddplaunch.base.safe_files import current_folder, list_dir
from ddplaunch.core.agent.node_ranks import RankProcess
from ddplaunch.core.agent.rank_channel import RankChannel
from ddplaunch.observe.diagnosis.inspection import ProcessCondition, Worker
from ddplaunch.observe.diagnosis.stack_parser import parse_dump
from ddplaunch.observe.node.rank_stack_dump import RankStackDump
from ddplaunch.system.processes.proc_utils import open_pidfd, read_proc_file

TOTAL_TIMEOUT_S = 0.5  # for all workers of all ranks
_WORKER_TIMEOUT_S = 0.2  # for one; a later dump would be taken for that of the next worker
_MAX_WORKERS = 64
_PROCESS_NAME = "pt_data_worker"  # the name that torch gives their processes; an old torch does not
_WORKER_LOOP_FILE, _PROCESS = (
    "torch/utils/data/_utils/worker.py",
    "multiprocessing/process.py",
)  # where their frames begin


class WorkerStackDumps:
    """Dumps the stacks of a rank's child processes, one after the other; ``inspected``: the results so far."""

    def __init__(self, process: RankProcess, channel: RankChannel, *, of_loader: bool) -> None:
        """``of_loader``: inspect the workers of a DataLoader; else any child process of multiprocessing."""
        self._process, self._channel, self._entry_file = process, channel, _WORKER_LOOP_FILE if of_loader else _PROCESS
        self.inspected: list[Worker] = []
        self._dump: RankStackDump | None = None
        self._pidfd: int | None = None
        self._pid, self._since = 0, 0.0
        self._retried: set[int] = set()
        parents = [process.pid, *(pid for pid in _list_children(process.pid) if _is_fork_server(pid))]
        self._parents = {child: pid for pid in parents for child in _list_children(pid)}
        children = [(pid, *found) for pid, parent in self._parents.items() if (found := _read_stat(pid, parent))]
        named = [each for each in children if each[1] == _PROCESS_NAME and of_loader]
        self.inspected += [Worker(pid, code=code) for pid, _, code, _ in named if code is not None]
        known = named if of_loader else children
        self.inspected += [Worker(pid, stopped=True) for pid, *_, stopped in known if stopped]
        self._left = [pid for pid, _, code, stopped in named or children if code is None and not stopped][:_MAX_WORKERS]

    def poll(self) -> bool:
        """Check whether a dump is complete, and start the next; return whether one is still awaited."""
        while self._dump is not None or self._left:
            if self._dump is None:
                self._start_dump(self._left.pop(0))
            elif self._dump.poll():
                if time.monotonic() - self._since < _WORKER_TIMEOUT_S:
                    return True
                self.give_up()
            else:
                self._on_dump(self._dump.text)
        return False

    def give_up(self) -> None:
        """Stop waiting for dumps."""
        if self._dump is not None:
            self._dump.give_up()
            self._on_dump(self._dump.text)
        self._left.clear()

    def _start_dump(self, pid: int) -> None:
        self._pidfd = open_pidfd(pid)
        if (found := _read_stat(pid, self._parents[pid])) is None or found[1] is not None or found[2]:
            self._close()  # it has ended or was stopped in the meantime
            return
        self._pid, self._since = pid, time.monotonic()
        process = RankProcess(self._process.rank, pid, self._pidfd)
        self._dump = RankStackDump(
            process, self._channel.stack_signals, self._channel.stacks_fd, ProcessCondition.ALIVE
        )

    def _on_dump(self, text: bytes | None) -> None:
        self._dump = None
        self._close()
        threads = parse_dump(text, current_folder()) if text else ()
        frames = threads[0].frames if threads else ()
        inside = tuple(takewhile(lambda frame: not frame.file.endswith(self._entry_file), frames))
        if len(inside) < len(frames):
            self.inspected.append(Worker(self._pid, inside))
        elif text is not None and self._pid not in self._retried:
            self._retried.add(self._pid)  # may be a second dump of the rank, if it got two signals
            self._left.insert(0, self._pid)

    def _close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _list_children(pid: int) -> list[int]:
    """The children of all threads of a process; empty if unknown."""
    threads = list_dir(f"/proc/{pid}/task")
    return sorted(int(child) for each in threads for child in read_proc_file(pid, f"task/{each}/children").split())


def _is_fork_server(pid: int) -> bool:
    """Whether a child process of a rank is the fork server of multiprocessing."""
    return b"from multiprocessing.forkserver import main" in read_proc_file(pid, "cmdline")


def _read_stat(pid: int, parent: int) -> tuple[str, int | None, bool] | None:
    """Return a child's name, its exit code (None while it lives), whether it is stopped; None if it is no child."""
    head, _, tail = read_proc_file(pid, "stat").rpartition(b")")
    fields = tail.split()
    if not fields or int(fields[1]) != parent:
        return None
    name = head.partition(b"(")[2].decode(errors="replace")
    code = os.waitstatus_to_exitcode(int(fields[49])) if fields[0] in b"ZX" else None
    return name, code, fields[0] in b"Tt"
