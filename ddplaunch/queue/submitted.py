"""The jobs that this user has handed to a scheduler: a small file for each, beside the history of runs.

The scheduler says how a job stands. How it ended is added here as soon as a command has asked, since the scheduler soon
forgets it. Without a home, nothing is kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.errors import sanitize_line
from ddplaunch.files import read_file_and_owner
from ddplaunch.job.history import MAX_TARGET_CHARS, history_dir, json_files, open_history_dir
from ddplaunch.queue.table import SCHEDULER_TITLES
from ddplaunch.wire.typed import parse

MAX_JOBS = 100  # that are kept
MAX_BYTES = 1 << 20  # of a file: an array has up to some thousand ends


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: in words, and its exit code."""

    words: str
    code: int


@dataclass(frozen=True)
class SubmittedJob:
    """A job as it was submitted."""

    number: str  # the scheduler's, like 4711, or 4711.pbs01
    cluster: str | None  # where there are several
    name: str
    target: str
    nodes: int
    array: str | None  # its indices
    cwd: str
    log: str  # with %a in that of an array
    run_id: str | None  # --run-id, as typed
    python: str  # that runs ddplaunch on the nodes
    image: str | None  # of its container
    moment: float  # of its submission, in seconds since the epoch
    ended: str | None = None  # how, in words
    code: int | None = None  # its exit code
    scheduler: str = "slurm"  # its name in ``queue/table.py``
    gone: float | None = None  # the moment since which it has ended, while its scheduler does not say how
    ends: Mapping[str, JobEnd] = field(default_factory=dict)  # of an array, by index
    errors: str | None = None  # the file of its stderr, where that is another

    @property
    def run_prefix(self) -> str:
        """How the names of its runs begin, up to a dot; in an array of Slurm each has a number of its own."""
        array = self.array and self.scheduler != "slurm"
        return self.run_id or (f"{self.number.partition('.')[0]}_" if array else f"{self.number}.")

    def end_of(self, index: str | None) -> JobEnd | None:
        """How it ended, or that of its array; None where that is not known."""
        if index:
            return self.ends.get(index)
        return None if self.code is None else JobEnd(self.ended or "", self.code)

    def log_paths(self, index: str | None) -> tuple[str | None, str | None]:
        """Those of its output and stderr; None where only its scheduler knows them, or there is none."""
        return self._file(self.log, index), self._file(self.errors, index)

    @staticmethod
    def _file(path: str | None, index: str | None) -> str | None:
        path = path and path.replace("%a", index or "%a")
        return None if path is None or re.search("%[a-zA-Z]", os.path.basename(path)) else path


def save_job(job: SubmittedJob) -> None:
    """Keep the job, in place of what was kept of it, and remove the oldest where there are too many."""
    with suppress(OSError):
        folder = open_history_dir(_jobs_dir(), create=True)
        try:
            data = json.dumps(
                {**vars(job), "target": sanitize_line(job.target, MAX_TARGET_CHARS)}, default=vars
            ).encode()
            name, new = _name(job), f".{_name(job)}.{os.getpid()}"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            for old in list_jobs()[MAX_JOBS:]:
                os.unlink(_name(old), dir_fd=folder)
        finally:
            os.close(folder)


def save_end(job: SubmittedJob, index: str | None, words: str, code: int) -> None:
    """Keep how it ended, or that of an array."""
    job = _read_job(os.path.join(_jobs_dir(), _name(job))) or job  # others of the array may have ended since
    if job.end_of(index) == (end := JobEnd(words, code)):
        return
    save_job(replace(job, ends={**job.ends, index: end}) if index else replace(job, ended=words, code=code))


def list_jobs() -> list[SubmittedJob]:
    """All that are kept, the latest first."""
    return sorted(filter(None, map(_read_job, json_files(_jobs_dir()))), key=lambda job: job.moment, reverse=True)


def find_job(word: str) -> SubmittedJob | None:
    """The job with this number, or with this array's number before an underscore, else the latest of this name.

    The server's name behind a number of PBS may be left out.
    """
    jobs = list_jobs()
    number, _, index = word.partition("_")
    array = number if index.partition(".")[0].isdecimal() else None

    def is_meant(job: SubmittedJob) -> bool:
        short = job.number.partition(".")[0]
        return word in (job.number, short) or (job.array is not None and short == array)

    numbered = filter(is_meant, jobs)
    return next(numbered, None) or next((job for job in jobs if job.name == word), None)


def _jobs_dir() -> str:
    return os.path.join(os.path.dirname(history_dir() or "/nowhere/runs"), "submitted")


def _name(job: SubmittedJob) -> str:
    where = job.cluster or job.scheduler
    return f"{job.number}.json" if where == "slurm" else f"{where}.{job.number}.json"


def _read_job(path: str) -> SubmittedJob | None:
    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        job = parse(data, SubmittedJob)
        return job if owner == os.geteuid() and job.scheduler in SCHEDULER_TITLES else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
