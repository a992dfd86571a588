"""Records of the jobs that this user has submitted: one small JSON file each, next to the history of runs.

The state of a job comes from its scheduler. How it ended is added here as soon as a command has queried it, since the
scheduler soon forgets it. Without a home directory, nothing is stored.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from msgspec.structs import replace

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.history_dir import MAX_TARGET_CHARS, history_dir, json_files, open_history_dir
from ddplaunch.base.safe_files import read_file_and_owner
from ddplaunch.base.types import as_dict, parse
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId
from ddplaunch.system.schedulers.scheduler_registry import SCHEDULER_TITLES
from ddplaunch.system.schedulers.submitted_job import JobEnd, SubmittedJob

MAX_JOBS = 100  # records; saving another one deletes the oldest
MAX_BYTES = 1 << 20  # of a record: an array may have some thousand ends


def save_job(job: SubmittedJob) -> None:
    """Write the record of a job, replacing an earlier one; delete the oldest records beyond ``MAX_JOBS``."""
    with suppress(OSError):
        folder = open_history_dir(_jobs_dir(), create=True)
        try:
            data = json.dumps({**as_dict(job), "target": sanitize_line(job.target, MAX_TARGET_CHARS)}).encode()
            name, new = _name(job), f".{_name(job)}.{os.getpid()}"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            for old in list_jobs()[MAX_JOBS:]:
                os.unlink(_name(old), dir_fd=folder)
        finally:
            os.close(folder)


def save_end(job: SubmittedJob, index: str | None, words: str, code: int) -> None:
    """Store how the job, or an index of its array, ended."""
    job = _read_job(os.path.join(_jobs_dir(), _name(job))) or job  # other indices may have ended since
    if job.get_end(index) == (end := JobEnd(words, code)):
        return
    save_job(replace(job, ends={**job.ends, index: end}) if index else replace(job, ended=words, code=code))


def store_end(job: SubmittedJob, which: JobId, state: BatchJobState | None) -> None:
    """Store how the job ended, if ``state`` says that it has."""
    if state and state.code is not None:
        save_end(job, which.index, state.description, state.code)


def list_jobs() -> list[SubmittedJob]:
    """All records, newest first."""
    return sorted(filter(None, map(_read_job, json_files(_jobs_dir()))), key=lambda job: job.moment, reverse=True)


def find_job(word: str) -> SubmittedJob | None:
    """Find a job by its number, or by NUMBER_INDEX for an array; else the newest job with this name.

    The server's name after a PBS number may be left out.
    """
    jobs = list_jobs()
    number, _, index = word.partition("_")
    array = number if index.partition(".")[0].isdecimal() else None

    def has_number(job: SubmittedJob) -> bool:
        short = job.number.partition(".")[0]
        return word in (job.number, short) or (job.array is not None and short == array)

    numbered = filter(has_number, jobs)
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
    except (OSError, ProtocolError):
        return None
