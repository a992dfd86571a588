"""The observer that keeps a run for later: what it was, what happened, and what its ranks printed last.

Of each attempt its beginning, the first collective and stalls that are over are written as they come, so that a
launcher that is killed leaves a trace; the rest follows as it ends. ``record`` reads it. All is in folders that only
this user may enter, as arguments and output can hold secrets. No trouble with the disk harms a run.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ddplaunch.errors import host_name, sanitize_line
from ddplaunch.output import events
from ddplaunch.output.events import Event
from ddplaunch.output.run_log import rank_file, run_names
from ddplaunch.output.times import times_file
from ddplaunch.plan.plan import Plan
from ddplaunch.rank.processes import start_ticks

MAX_RUNS = 100  # that are kept
SIZE_CHECK_EVERY = 5  # runs that left output, about: then it is looked how many bytes all take
MAX_TARGET_CHARS = 1000  # characters of the target that are kept
MAX_EVENTS = 20_000  # of an attempt
MAX_BYTES = 4 << 20  # of the attempts in a file, but the last
MAX_INSPECTION = 8 << 20  # bytes; of 1,000 ranks with their stacks it has less
MAX_OUTPUT = 64 << 20  # bytes of what all ranks together printed last
MAX_OUTPUT_DONE = 8 << 20  # the same, of a run that succeeded

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HOME_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
)  # there is none to keep anything, nor need there be


def history_dir() -> str | None:
    """Where the history is: a folder of a folder for each run; None where this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        home = os.path.expanduser("~")
        if not os.path.isdir(home):
            return None
        state = os.path.join(home, ".local", "state")
    return os.path.join(state, "ddplaunch", "runs")


def open_history_dir(path: str, *, create: bool) -> int:
    """Open the folder of the history at ``path``, and return its descriptor.

    Raises OSError if it is not there, cannot be made, or is not this user's own folder.
    """
    parent = os.path.dirname(path)
    if create:
        os.makedirs(os.path.dirname(parent), 0o700, exist_ok=True)
    os.close(_open_private_dir(parent, make=create))
    return _open_private_dir(path, make=create)


def json_files(path: str) -> list[str]:
    """The paths of the JSON files in a folder of the user's own; none where it is not there, or another user's."""
    try:
        os.close(open_history_dir(path, create=False))
        names = [name for name in os.listdir(path) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return []
    return [os.path.join(path, name) for name in names]


def _open_private_dir(path: str, *, make: bool) -> int:
    if make:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:  # a link too
        raise OSError(errno.ENOTDIR, f"{path} is not a folder", path) from None
    found = os.fstat(folder)
    if found.st_uid != os.geteuid():
        os.close(folder)
        raise OSError(errno.ENOTDIR, f"{path} belongs to another user", path)
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(folder, 0o700)
    return folder


class HistoryRecorder:
    """Keeps one node's share of a run, where the user has a home for it."""

    def __init__(
        self,
        plan: Plan,
        output_tail: Callable[[int], bytes],
        log_dir: Callable[[], str | None],
        notify: Callable[[str], None],
        times: Callable[[int, int], bytes] = lambda rank, count: b"",
    ) -> None:
        """``output_tail`` gives what a rank printed last in its attempt, ``log_dir`` the folder of --log-dir.

        ``times(rank, count)`` returns the content of the file with the times of the last ``count`` bytes of a rank.
        """
        self._plan, self._printed, self._log_dir, self._note, self._times = plan, output_tail, log_dir, notify, times
        self._began = time.time()
        self._folder: int | None = None  # this run's, once something is written
        self._file = ""
        self._trouble: OSError | None = None
        self._attempt: list[tuple[Event, float]] = []  # what has happened in it
        self._number = self._heard = 0  # of the attempt, and events in it
        self._late = True  # whether the job had started before this node took part
        self._begun = b""  # the line of its start, until it is written
        self._awaited = 0  # ranks that have not started
        self._size = 0  # bytes written
        self._left_out = 0  # attempts in a row
        self._outputs: list[str] = []  # files of what ranks had printed when the last attempt failed

    def observe(self, event: Event) -> None:
        if self._trouble:
            return self._finish() if isinstance(event, events.JobEnded) else None
        if isinstance(event, events.AttemptPlanned):
            self._plan, self._number = event.plan, event.attempt
            self._late &= event.attempt > 0
            self._begun = events.event_to_json(event, time.time())
            self._awaited, self._heard = len(event.plan.local_ranks), 0
            return
        if isinstance(event, events.RankStarted):
            self._awaited -= 1
        self._heard += 1
        if self._heard < MAX_EVENTS or isinstance(event, _ATTEMPT_END_EVENTS):
            self._attempt.append((event, time.time()))
        if isinstance(event, events.RankStarted) and self._awaited == 0:  # not before: a busy disk may take its time
            self._flush_attempt(anew=True)
        if isinstance(event, _FLUSH_EVENTS):
            self._flush_attempt()
        if isinstance(event, _ATTEMPT_END_EVENTS):
            self._finish_attempt(event)
        if isinstance(event, events.JobEnded):
            self._finish()

    @property
    def folder(self) -> int | None:
        """This run's, open, for what is kept besides; None before its ranks have started, and after its end."""
        return self._folder

    def _flush_attempt(self, *, anew: bool = False) -> None:
        """Write what has happened in this attempt so far; ``anew``: also where there is no file yet."""
        try:
            if anew and self._folder is None:
                self._create_files()
            if self._folder is not None and self._size <= MAX_BYTES:
                self._append_event()
        except OSError as error:
            self._trouble = error

    def _create_files(self) -> None:
        """Make this run's folder and its file; RUN_ID.2 and so on where RUN_ID is an earlier run's.

        In a run that goes on already, the file of a node that comes again, or in another's place, is node-1.2.jsonl.
        """
        path = history_dir()
        if path is None:
            raise OSError(errno.ENOENT, "no home")
        above = open_history_dir(path, create=True)
        try:
            share = f"node-{self._plan.node_rank}"
            names = ((name, share) for name in run_names(self._plan.run_id))
            if going_on := self._going_on():
                names = ((going_on, file) for file in run_names(share))
            for name, file_name in names:
                self._file = f"{file_name}.jsonl"
                try:
                    os.mkdir(name, 0o700, dir_fd=above)
                except FileExistsError:
                    pass  # another node's, or an earlier run's
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
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
                    os.rmdir(name, dir_fd=above)
                    raise
                self._folder = folder
                return
        finally:
            os.close(above)

    def _going_on(self) -> str | None:
        """The name of the run, where this node has joined it after its start and node 0's record, or our own, is here.

        Whether the newest run of this id is meant, and no earlier one, shows in what has happened in its time.
        """
        if not self._late or not self._plan.node_rank:
            return None
        from ddplaunch.job.past import newest_of

        return newest_of(self._plan.run_id, self._began)

    def _build_header(self) -> dict[str, object]:
        plan = self._plan
        return {
            "run_id": plan.run_id,
            "target": sanitize_line(" ".join(plan.target.argv), MAX_TARGET_CHARS),
            "argv": ["ddplaunch", *redact_token(sys.argv[1:])],
            "host": host_name(),
            "cwd": _current_dir(),
            "pid": os.getpid(),
            "born": max(0, start_ticks(os.getpid())),
            "began": self._began,
            "job": scheduler_job_id(os.environ),
            "node_rank": plan.node_rank,
            "nnodes": plan.nnodes,
            "world_size": plan.world_size,
            "log_dir": os.path.join(_current_dir(), log_dir) if (log_dir := self._log_dir()) else None,
        }

    def _finish_attempt(self, last: events.Restarting | events.JobEnded) -> None:
        """Write the rest of what has happened in this attempt, and what its ranks printed last."""
        over, well = isinstance(last, events.JobEnded), last == events.JobEnded(0, None)
        try:
            if self._folder is None:
                self._create_files()  # the job ends before any rank was planned
            if not over and self._size > MAX_BYTES and self._begun:
                self._left_out += 1
                self._attempt.clear()
            else:
                self._append_event()
            if self._log_dir() is None:
                self._save_outputs(MAX_OUTPUT_DONE if well else MAX_OUTPUT)
        except OSError as error:
            self._trouble = error

    def _append_event(self) -> None:
        head = events.event_to_json(events.AttemptsOmitted(self._left_out), time.time()) if self._left_out else b""
        with os.fdopen(os.open(self._file, _FLAGS | os.O_APPEND, 0o600, dir_fd=self._folder), "wb") as file:
            self._size += file.write(b"".join([head, self._begun, *map(_event_line, self._attempt)]))
        self._begun = b""
        self._attempt.clear()

    def _save_outputs(self, limit: int) -> None:
        """Write it for each rank of the attempt, in the place of an earlier one's."""
        for name in self._outputs:
            os.unlink(name, dir_fd=self._folder)
        self._outputs.clear()
        ranks = self._plan.local_ranks
        for rank in ranks:
            if data := self._printed(rank.rank)[-limit // len(ranks) :]:
                name = rank_file(rank.rank, self._number)
                for path, content in ((name, data), (times_file(name), self._times(rank.rank, len(data)))):
                    with os.fdopen(os.open(path, _FLAGS | os.O_TRUNC, 0o600, dir_fd=self._folder), "wb") as file:
                        self._outputs.append(path)
                        file.write(content)

    def _finish(self) -> None:
        if self._trouble and self._trouble.errno not in _NO_HOME_ERRORS:
            self._note(f"the history has no full record of this run: {self._trouble.strerror}")
        if self._folder is None:
            return
        os.close(self._folder)
        self._folder = None
        with suppress(OSError):
            kept = len(os.listdir(history_dir() or "/"))
            if kept > MAX_RUNS or (self._outputs and kept % SIZE_CHECK_EVERY == 0):
                from ddplaunch.job.past import prune

                prune()


_ATTEMPT_END_EVENTS = (events.Restarting, events.JobEnded)
_FLUSH_EVENTS = (events.FirstCollective, events.StallEnded)  # not a stall itself: it may be of the disk
_IGNORED_EVENTS = (events.ZygoteReady, events.SidecarStarted, events.SidecarListening, events.SidecarExited)


def redact_token(words: Sequence[str]) -> list[str]:
    """Words that were typed, without the value of --token."""
    hidden = [
        "…" if before == "--token" else "--token=…" if word.startswith("--token=") else word
        for before, word in itertools.pairwise(["", *words])
    ]
    return hidden


_JOB_ID_VARIABLES = {"SLURM_JOB_ID": "", "PBS_JOBID": "", "LSB_JOBID": "LSB_JOBINDEX", "JOB_ID": "SGE_TASK_ID"}
"""The variables of a job's number, and of its index in an array where that is apart."""


def scheduler_job_id(environ: Mapping[str, str]) -> str | None:
    """The number of the scheduler's job that we run in, as people type it: 4711, 4711_3; None outside of one."""
    for name, index in _JOB_ID_VARIABLES.items():
        if (number := environ.get(name, "").partition(".")[0]) and (not index or index in environ):
            number = number.replace("[", "_").rstrip("]")  # PBS: 1234[7].server
            place = environ.get(index, "0")
            return f"{number}_{place}" if place.isdecimal() and place != "0" else number
    return None


def _event_line(happened: tuple[Event, float]) -> bytes:
    """An event as a line of the file; nothing for what is not kept."""
    event, moment = happened
    if isinstance(event, _IGNORED_EVENTS):
        return b""
    line = events.event_to_json(event, moment)
    return line if not isinstance(event, events.RanksInspected) or len(line) <= MAX_INSPECTION else b""


def _current_dir() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""
