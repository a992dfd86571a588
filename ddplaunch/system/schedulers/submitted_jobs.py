"""Records of the jobs that this user has submitted: one small JSON file each, next to the history of runs.

The state of a job comes from its scheduler. How it ended is added here as soon as a command has queried it, since the
scheduler soon forgets it. Without a home directory, nothing is stored.
"""

from __future__ import annotations

from zlib import crc32

from msgspec.structs import replace

from ddplaunch.system.record_folder import RecordFolder
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId
from ddplaunch.system.schedulers.scheduler_registry import SCHEDULER_TITLES
from ddplaunch.system.schedulers.submitted_job import JobEnd, SubmittedJob


def _file_name(job: SubmittedJob) -> str:
    where, number = job.cluster or job.scheduler, job.number.replace("/", "-")
    if "/" in where:  # the name of a context of Kubernetes may be long, and any text
        where = f"{job.scheduler}-{crc32(where.encode()):08x}"
    return f"{number}.json" if where == "slurm" else f"{where}.{number}.json"


_RECORDS = RecordFolder("submitted", SubmittedJob, _file_name, lambda job: job.moment)

save_job = _RECORDS.save


def save_end(job: SubmittedJob, index: str | None, words: str, code: int, last_lines: str = "") -> None:
    """Store how the job, or an index of its array, ended."""
    if job.by_hand:
        return
    job = _RECORDS.reread(job)  # other indices may have ended since
    if job.get_end(index) == (end := JobEnd(words, code)):
        return
    ended = replace(job, ended=words, code=code, last_lines=last_lines)
    save_job(replace(job, ends={**job.ends, index: end}) if index else ended)


def save_end_if_known(job: SubmittedJob, which: JobId, state: BatchJobState | None) -> None:
    """Store how the job ended, if its ``state`` has an exit code."""
    if state and state.code is not None:
        save_end(job, which.index, state.description, state.code, state.last_lines)


def list_jobs() -> list[SubmittedJob]:
    """All records, newest first; without those of schedulers that this installation lacks."""
    return [job for job in _RECORDS.list() if job.scheduler in SCHEDULER_TITLES]


def find_job(word: str) -> SubmittedJob | None:
    """Find a job by its number, or by NUMBER_INDEX for an array; else the newest job or grid with this name.

    The server's name after a PBS number may be left out.
    """
    jobs = list_jobs()
    number, _, index = word.partition("_")
    array = number if index.partition(".")[0].isdecimal() else None

    def has_number(job: SubmittedJob) -> bool:
        short = job.number.rpartition("/")[2].partition(".")[0]
        return word in (job.number, short) or (job.array is not None and short == array)

    numbered = filter(has_number, jobs)
    return next(numbered, None) or next((job for job in jobs if word == job.name or word in job.runs), None)
