"""The job of Slurm that a word means, and how it stands: for the commands that work on runs here and on jobs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.job import past, runs, submitted
from ddplaunch.job.submitted import Submitted

if TYPE_CHECKING:
    from ddplaunch.submit.queue import JobId, JobRecord


def job_meant(word: str | None) -> Submitted | None:
    """The submitted job that ``word`` means; None where it means a run on this machine, or nothing that is known."""
    if word is None:
        return None
    job = submitted.find(word)
    if job is None or word in past.names():
        return None
    if any(word == str(run.pid) or run.run_id.startswith(job.run) for run in runs.all_running()):
        return None  # as on its node
    return job


def one_of(job: Submitted, word: str, command: str) -> JobId:
    """The job as Slurm names it. Raises UsageError for an array without an index."""
    from ddplaunch.submit.queue import JobId

    index = word.partition("_")[2] if job.array and word != job.name else ""
    if job.array and not index:
        what = f"job {job.number} is an array of --array {job.array}"
        raise UsageError(what, f"name one by its index: ddplaunch {command} {job.number}_INDEX")
    return JobId(f"{job.number}_{index}" if index else job.number, job.cluster)


class Unanswered(LaunchError):
    """Slurm does not answer."""

    exit_code = EXIT_UNAVAILABLE


def found(which: JobId) -> JobRecord:
    """How Slurm says that a job stands.

    Raises:
        Unanswered: it says nothing.
        LaunchError: it does not know the job any more.
    """
    import shutil

    from ddplaunch.submit.queue import look

    if shutil.which("scontrol") is None:
        raise Unanswered("scontrol is not on PATH: this machine has no commands of Slurm", "type it on a login node")
    seen = look(which)
    if seen is None:
        what = f"scontrol does not answer, so how job {which.number} stands is not known"
        raise Unanswered(what, "scontrol ping says whether Slurm's controller is there")
    return seen


def standing(job: Submitted, which: JobId) -> JobRecord:
    """How it stands; how it ended is kept.

    Raises:
        LaunchError: Slurm does not answer, or neither Slurm nor we know it any more.
    """
    from ddplaunch.submit.queue import JobRecord

    try:
        seen = found(which)
    except Unanswered:
        raise
    except LaunchError:
        if job.code is None or job.array:
            raise
        return JobRecord("ENDED", "None", job.code, job.log, number=job.number, said=job.ended)
    if seen.code is not None and not job.array:
        submitted.over(job, seen.words, seen.code)
    return seen if seen.log else replace(seen, log=job.log.replace("%a", which.number.partition("_")[2]))


def running(job: Submitted, which: JobId) -> JobRecord:
    """How it stands, where it runs. Raises UsageError if it waits or has ended, or its nodes cannot be asked."""
    seen = standing(job, which)
    if seen.code is not None:
        raise UsageError(f"job {which.number} {seen.words}", f"ddplaunch report {which.number}")
    if seen.state != "RUNNING":
        raise UsageError(f"job {which.number} {seen.words}: no rank runs", f"ddplaunch attach {which.number} waits")
    if job.image:
        what = f"job {which.number} runs in a container, which srun --overlap does not enter"
        raise UsageError(what, f"ddplaunch attach {which.number} shows its log")
    return seen


def run_of(job: Submitted, seen: JobRecord) -> str:
    """The name of its latest run, or how that begins, where the nodes keep the history elsewhere."""
    return kept_run(job, seen) or job.run_id or f"{seen.number}."


def kept_run(job: Submitted, seen: JobRecord) -> str | None:
    """The name of its latest run in the history that this machine has, as where nodes share a home."""
    begins = job.run_id or f"{seen.number}."
    return next((name for name in past.names() if name.startswith(begins)), None)
