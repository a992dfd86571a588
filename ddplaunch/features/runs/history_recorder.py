"""The observer that records a run in the history: its command, its events, and the last output of its ranks.

The start of each attempt, its first collective and the end of stalls are written as they come, so that a launcher that
is killed leaves a record; the rest is written at the end of the attempt. ``run_record`` reads them. All files are in
folders that only this user may enter, as arguments and output can hold secrets. Disk errors never harm a run.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from ddplaunch.base.errors import host_name, sanitize_line
from ddplaunch.base.redaction import redact_words, redacted_argv
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.types import as_dict
from ddplaunch.core import events
from ddplaunch.core.events import Event
from ddplaunch.core.output.run_log import candidate_names, rank_file
from ddplaunch.core.output.times import times_file
from ddplaunch.features.runs.provenance import SUFFIX
from ddplaunch.features.runs.provenance_process import ProvenanceProcess
from ddplaunch.features.runs.time_tracker import TimeTracker
from ddplaunch.observe.history import history_store
from ddplaunch.system.code_version import read_code_version
from ddplaunch.system.history_dir import MAX_TARGET_CHARS, history_dir, open_history_dir
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes.proc_utils import start_ticks

SIZE_CHECK_EVERY = 5  # about this many runs with output are between two checks of the history's size
SIZE_CHECK_SHARE = 20  # with many runs, 1/20 of them are between two checks: a check looks at all
MAX_EVENTS = 20_000  # of an attempt
MAX_BYTES = 4 << 20  # of a file; only the last attempt may exceed it
MAX_INSPECTION = 8 << 20  # bytes; an inspection of 1,000 ranks with their stacks is smaller
MAX_OUTPUT = 64 << 20  # bytes of the last output of all ranks together
MAX_OUTPUT_DONE = 8 << 20  # the same, of a run that succeeded

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HOME_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)  # no writable home: not worth a note


class HistoryRecorder(TimeTracker):
    """Records one node's part of a run, if the user has a home; also tracks its time."""

    def __init__(
        self,
        plan: Plan,
        output_tail: Callable[[int], bytes],
        log_dir: Callable[[], str | None],
        notify: Callable[[str], None],
        times: Callable[[int, int], bytes] = lambda rank, count: b"",
        control_socket: Callable[[], str | None] = lambda: None,
        provenance: ProvenanceProcess | None = None,
    ) -> None:
        """``output_tail`` returns the last output of a rank in its attempt, ``log_dir`` the folder of --log-dir.

        ``times(rank, count)`` returns the content of the file with the times of the last ``count`` bytes of a rank,
        ``control_socket`` the path of the launcher's control socket; ``provenance`` records what the run was.
        """
        super().__init__(plan.nnodes)
        self._plan, self._output_tail, self._log_dir, self._notify = plan, output_tail, log_dir, notify
        self._times, self._control_socket, self._provenance = times, control_socket, provenance
        self._folder: int | None = None  # this run's, once something is written
        self._file = self._path = ""  # the record's name; the beginning of the paths of further files
        self._error: OSError | None = None
        self._pending: list[tuple[Event, float]] = []  # events of the attempt that are not written yet
        self._attempt = self._event_count = 0  # the attempt's number, and the number of its events
        self._joined_late = True  # whether the job had started before this node joined
        self._start_line = b""  # the first line of the attempt, until it is written
        self._starting = 0  # ranks that have not started
        self._size = 0  # bytes written
        self._left_out = 0  # attempts in a row that were not written
        self._output_files: list[str] = []  # of the last attempt whose output was written

    def observe(self, event: Event) -> None:
        super().observe(event)
        if self._error and self._folder is None:  # no file can be made
            return self._finish() if isinstance(event, events.JobEnded) else None
        if isinstance(event, events.AttemptPlanned):
            if self._error:
                self._pending.clear()  # of the attempt before this one
            self._plan, self._attempt = event.plan, event.attempt
            self._joined_late &= event.attempt > 0
            self._start_line = events.event_to_json(event, time.time())
            self._starting, self._event_count = len(event.plan.local_ranks), 0
            return
        if isinstance(event, events.RankStarted):
            self._starting -= 1
        self._event_count += 1
        if self._event_count < MAX_EVENTS or isinstance(event, _ATTEMPT_END_EVENTS):
            self._pending.append((event, time.time()))
        if isinstance(event, events.RankStarted) and self._starting == 0:  # not earlier: the disk may be slow
            self._flush_attempt(create=True)
        if isinstance(event, _FLUSH_EVENTS):
            self._flush_attempt()
        if isinstance(event, _ATTEMPT_END_EVENTS):
            self._finish_attempt(event)
        if isinstance(event, events.JobEnded):
            self._finish()

    @property
    def folder(self) -> int | None:
        """Descriptor of this run's folder, for further files; None before its ranks have started and after its end."""
        return self._folder

    @property
    def path(self) -> str | None:
        """Path of this run's folder; None as for ``folder``."""
        return None if self._folder is None else os.readlink(f"/proc/self/fd/{self._folder}")

    def _flush_attempt(self, *, create: bool = False) -> None:
        """Write the events of this attempt so far; ``create``: also if there is no file yet."""
        try:
            if create and self._folder is None:
                self._create_files()
                if self._provenance:
                    self._provenance.start(self._plan, self._path)
            if self._folder is not None and self._size <= MAX_BYTES:
                self._append_event()
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        if self._provenance:
            self._provenance.finish()

    def _create_files(self) -> None:
        """Make this run's folder and its file; RUN_ID.2 and so on if RUN_ID is an earlier run.

        In a run that is already running, the file of a node that joins again or replaces another is node-1.2.jsonl.
        """
        path = history_dir()
        if path is None:
            raise OSError(errno.ENOENT, "no home")
        parent = open_history_dir(path, create=True)
        try:
            node = f"node-{self._plan.node_rank}"
            names = ((name, node) for name in candidate_names(self._plan.run_id))
            if joined := self._find_joined_run():
                names = ((joined, file) for file in candidate_names(node))
            for name, file_name in names:
                self._file = f"{file_name}.jsonl"
                try:
                    os.mkdir(name, 0o700, dir_fd=parent)
                except FileExistsError:
                    pass  # another node has made it, or an earlier run
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                try:
                    file = os.open(self._file, _FLAGS | os.O_EXCL, 0o600, dir_fd=folder)
                except FileExistsError:
                    os.close(folder)
                    continue
                try:
                    with os.fdopen(file, "wb", 0) as writing:
                        writing.write(json.dumps(self._build_header()).encode() + b"\n")
                except OSError:  # the disk is full
                    os.unlink(self._file, dir_fd=folder)
                    os.close(folder)
                    with suppress(OSError):  # another node has its record there
                        os.rmdir(name, dir_fd=parent)
                    raise
                self._folder = folder
                self._path = os.path.join(path, name, file_name + SUFFIX)
                return
        finally:
            os.close(parent)

    def _find_joined_run(self) -> str | None:
        """Name of the run, if this node joined it after its start and the record of node 0 or of this node is here.

        It is the newest run with this id, if that was still running when this launcher started.
        """
        if not self._joined_late or not self._plan.node_rank:
            return None
        return history_store.find_newest_run(self._plan.run_id, self._began)

    def _build_header(self) -> dict[str, object]:
        plan = self._plan
        return {
            "run_id": plan.run_id,
            "target": sanitize_line(" ".join(redact_words(plan.target.argv)), MAX_TARGET_CHARS),
            "argv": redacted_argv(),
            "host": host_name(),
            "cwd": current_folder(),
            "pid": os.getpid(),
            "born": max(0, start_ticks(os.getpid())),
            "control_socket": self._control_socket(),
            "began": self._began,
            "job": scheduler_job_id(os.environ),
            "node_rank": plan.node_rank,
            "nnodes": plan.nnodes,
            "domain": plan.domain or None if plan.nnodes > 1 else None,
            "world_size": plan.world_size,
            "code_version": as_dict(version) if (version := read_code_version(os.environ)) else None,
            "log_dir": os.path.join(current_folder(), log_dir) if (log_dir := self._log_dir()) else None,
        }

    def _finish_attempt(self, last: events.Restarting | events.JobEnded) -> None:
        """Write the remaining events of this attempt, and the last output of its ranks."""
        has_ended, succeeded = isinstance(last, events.JobEnded), last == events.JobEnded(0, None)
        try:
            if self._folder is None:
                self._create_files()  # the job ends before any rank was planned
            if not has_ended and self._size > MAX_BYTES and self._start_line:
                self._left_out += 1
                self._pending.clear()
            else:
                self._append_event()
            if self._log_dir() is None:
                self._save_outputs(MAX_OUTPUT_DONE if succeeded else MAX_OUTPUT)
        except OSError as error:
            self._error = error

    def _append_event(self) -> None:
        head = b"\n" if self._error else b""  # the last line may be torn
        if self._left_out:
            head += events.event_to_json(events.AttemptsOmitted(self._left_out), time.time())
        with os.fdopen(os.open(self._file, _FLAGS | os.O_APPEND, 0o600, dir_fd=self._folder), "wb") as file:
            self._size += file.write(b"".join([head, self._start_line, *map(_event_line, self._pending)]))
        self._start_line = b""
        self._pending.clear()

    def _save_outputs(self, limit: int) -> None:
        """Write the last output of each rank of the attempt; it replaces that of an earlier attempt."""
        for name in self._output_files:
            os.unlink(name, dir_fd=self._folder)
        self._output_files.clear()
        ranks = self._plan.local_ranks
        for rank in ranks:
            if data := self._output_tail(rank.rank)[-limit // len(ranks) :]:
                name = rank_file(rank.rank, self._attempt)
                for path, content in ((name, data), (times_file(name), self._times(rank.rank, len(data)))):
                    with os.fdopen(os.open(path, _FLAGS | os.O_TRUNC, 0o600, dir_fd=self._folder), "wb") as file:
                        self._output_files.append(path)
                        file.write(content)

    def _finish(self) -> None:
        if self._error and self._error.errno not in _NO_HOME_ERRORS:
            self._notify(f"the record of this run in the history is incomplete: {self._error.strerror}")
        if self._folder is None:
            return
        if self._file == "node-0.jsonl":  # node 0 alone ends the run: an elastic job goes on without other nodes
            history_store.mark_run_over(self._folder)
        os.close(self._folder)
        self._folder = None
        with suppress(OSError):
            count = len(os.listdir(history_dir() or "/"))
            every = max(SIZE_CHECK_EVERY, count // SIZE_CHECK_SHARE)
            if count > history_store.MAX_RUNS or (self._output_files and count % every == 0):
                history_store.prune()


_ATTEMPT_END_EVENTS = (events.Restarting, events.JobEnded)
_FLUSH_EVENTS = (events.FirstCollective, events.StallEnded)  # not JobStalled: the disk may be what stalls


_JOB_ID_VARIABLES = {
    "DDPLAUNCH_LOCAL_JOB": "",
    "SLURM_JOB_ID": "",
    "PBS_JOBID": "",
    "LSB_JOBID": "LSB_JOBINDEX",
    "JOB_ID": "SGE_TASK_ID",
}
"""Environment variables of the job id, and of the index in a job array if that is a variable of its own."""


def scheduler_job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id of the batch job that this process runs in, as the user types it: 4711, 4711_3; None outside."""
    for name, index in _JOB_ID_VARIABLES.items():
        if (number := environ.get(name, "").partition(".")[0]) and (not index or index in environ):
            number = number.replace("[", "_").rstrip("]")  # PBS: 1234[7].server
            task = environ.get(index, "0")
            return f"{number}_{task}" if task.isdecimal() and task != "0" else number
    return None


def _event_line(pending: tuple[Event, float]) -> bytes:
    """Format an event as a line of the file; empty if it is not recorded."""
    event, moment = pending
    if isinstance(event, events.StoredEvent) and not event.in_history:
        return b""
    line = events.event_to_json(event, moment)
    return line if not isinstance(event, events.RanksInspected) or len(line) <= MAX_INSPECTION else b""
