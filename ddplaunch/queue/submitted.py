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
from ddplaunch.errors import shown
from ddplaunch.files import read_owned
from ddplaunch.job.history import MAX_TARGET, enter, json_files, place
from ddplaunch.queue.table import SCHEDULERS
from ddplaunch.wire.typed import parse

MAX_JOBS = 100  # that are kept
MAX_BYTES = 1 << 20  # of a file: an array has up to some thousand ends


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: in words, and its exit code."""

    words: str
    code: int


@dataclass(frozen=True)
class Submitted:
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
    def run(self) -> str:
        """How the names of its runs begin, up to a dot; in an array of Slurm each has a number of its own."""
        array = self.array and self.scheduler != "slurm"
        return self.run_id or (f"{self.number.partition('.')[0]}_" if array else f"{self.number}.")

    def end_of(self, index: str | None) -> JobEnd | None:
        """How it ended, or that of its array; None where that is not known."""
        if index:
            return self.ends.get(index)
        return None if self.code is None else JobEnd(self.ended or "", self.code)

    def files(self, index: str | None) -> tuple[str | None, str | None]:
        """Those of its output and stderr; None where only its scheduler knows them, or there is none."""
        return self._file(self.log, index), self._file(self.errors, index)

    @staticmethod
    def _file(path: str | None, index: str | None) -> str | None:
        path = path and path.replace("%a", index or "%a")
        return None if path is None or re.search("%[a-zA-Z]", os.path.basename(path)) else path


def keep(job: Submitted) -> None:
    """Keep the job, in place of what was kept of it, and remove the oldest where there are too many."""
    with suppress(OSError):
        folder = enter(_place(), make=True)
        try:
            data = json.dumps({**vars(job), "target": shown(job.target, MAX_TARGET)}, default=vars).encode()
            name, new = _name(job), f".{_name(job)}.{os.getpid()}"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            for old in every()[MAX_JOBS:]:
                os.unlink(_name(old), dir_fd=folder)
        finally:
            os.close(folder)


def over(job: Submitted, index: str | None, words: str, code: int) -> None:
    """Keep how it ended, or that of an array."""
    job = _read(os.path.join(_place(), _name(job))) or job  # others of the array may have ended since
    if job.end_of(index) == (end := JobEnd(words, code)):
        return
    keep(replace(job, ends={**job.ends, index: end}) if index else replace(job, ended=words, code=code))


def every() -> list[Submitted]:
    """All that are kept, the latest first."""
    return sorted(filter(None, map(_read, json_files(_place()))), key=lambda job: job.moment, reverse=True)


def find(word: str) -> Submitted | None:
    """The job with this number, or with this array's number before an underscore, else the latest of this name.

    The server's name behind a number of PBS may be left out.
    """
    jobs = every()
    number, _, index = word.partition("_")
    array = number if index.partition(".")[0].isdecimal() else None

    def is_meant(job: Submitted) -> bool:
        short = job.number.partition(".")[0]
        return word in (job.number, short) or (job.array is not None and short == array)

    numbered = filter(is_meant, jobs)
    return next(numbered, None) or next((job for job in jobs if job.name == word), None)


def _place() -> str:
    return os.path.join(os.path.dirname(place() or "/nowhere/runs"), "submitted")


def _name(job: Submitted) -> str:
    where = job.cluster or job.scheduler
    return f"{job.number}.json" if where == "slurm" else f"{where}.{job.number}.json"


def _read(path: str) -> Submitted | None:
    try:
        data, owner = read_owned(path, MAX_BYTES, links=False)
        job = parse(data, Submitted)
        return job if owner == os.geteuid() and job.scheduler in SCHEDULERS else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
