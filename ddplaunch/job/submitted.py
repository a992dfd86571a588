"""The jobs that this user has handed to a scheduler: a small file for each, beside the history of runs.

What became of a job is the scheduler's to say; how it ended is added once somebody has asked, as that soon forgets it.
Where there is no home, nothing is kept.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Literal

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.errors import shown
from ddplaunch.files import read_owned
from ddplaunch.job.history import MAX_TARGET, enter, place

MAX_JOBS = 100  # that are kept
MAX_BYTES = 64 << 10  # of a file


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
    scheduler: Literal["slurm", "sge", "pbs", "lsf"] = "slurm"
    gone: float | None = None  # the moment since which it has ended, while its scheduler does not say how

    @property
    def run(self) -> str:
        """How the names of its runs begin, with a dot behind them."""
        return self.run_id or f"{self.number}."


def keep(job: Submitted) -> None:
    """Keep the job, in place of what was kept of it, and remove the oldest where there are too many."""
    with suppress(OSError):
        folder = enter(_place(), make=True)
        try:
            data = json.dumps({**vars(job), "target": shown(job.target, MAX_TARGET)}).encode()
            name, new = _file(job), f".{_file(job)}.{os.getpid()}"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            for old in every()[MAX_JOBS:]:
                os.unlink(_file(old), dir_fd=folder)
        finally:
            os.close(folder)


def over(job: Submitted, words: str, code: int) -> None:
    """Keep how it ended."""
    if (job.ended, job.code) != (words, code):
        keep(replace(job, ended=words, code=code))


def every() -> list[Submitted]:
    """All that are kept, the latest first."""
    try:
        os.close(enter(_place(), make=False))
        names = [name for name in os.listdir(_place()) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return []
    found = filter(None, (_read(os.path.join(_place(), name)) for name in names))
    return sorted(found, key=lambda job: job.moment, reverse=True)


def find(word: str) -> Submitted | None:
    """The job with this number, or with this array's number before an underscore, else the latest of this name.

    The server's name behind a number of PBS may be left out.
    """
    jobs = every()
    number, _, index = word.partition("_")
    array = number if index.isdecimal() else None
    numbered = (
        job for job in jobs if word in (job.number, job.number.partition(".")[0]) or (job.array and job.number == array)
    )
    return next(numbered, None) or next((job for job in jobs if job.name == word), None)


def _place() -> str:
    return os.path.join(os.path.dirname(place() or "/nowhere/runs"), "submitted")


def _file(job: Submitted) -> str:
    where = job.cluster or job.scheduler
    return f"{job.number}.json" if where == "slurm" else f"{where}.{job.number}.json"


def _read(path: str) -> Submitted | None:
    import msgspec

    from ddplaunch.control.typed import decode

    try:
        data, owner = read_owned(path, MAX_BYTES, links=False)
        return decode(data, Submitted) if owner == os.geteuid() else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
