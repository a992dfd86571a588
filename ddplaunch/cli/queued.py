"""The submitted job that a word means, and how it stands: for the commands that work on runs here and on jobs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.job import past, runs, submitted
from ddplaunch.job.submitted import Submitted
from ddplaunch.submit.schedulers import SCHEDULERS, scheduler_of

if TYPE_CHECKING:
    from ddplaunch.submit.follow import Record, Scheduler
    from ddplaunch.submit.queue import JobId, JobRecord


def job_meant(word: str | None) -> Submitted | None:
    """The submitted job that ``word`` means; None where it means a run on this machine, or nothing that is known."""
    if word is None:
        return None
    job = submitted.find(word)
    if job is None or (past.is_kept(word) and not _is_of(job.run, word)):
        return None
    if any(word == str(run.pid) or _is_of(job.run, run.run_id) for run in runs.all_running()):
        return None  # as on its node
    return job


def one_of(job: Submitted, word: str, command: str) -> JobId:
    """The job as its scheduler names it. Raises UsageError for an array without an index."""
    from ddplaunch.submit.queue import JobId

    index = word.partition("_")[2] if job.array and word != job.name else ""
    if job.array and not index:
        what = f"job {job.number} is an array of --array {job.array}"
        raise UsageError(what, f"name one by its index: ddplaunch {command} {job.number}_INDEX")
    return JobId(f"{job.number}_{index}" if index else job.number, job.cluster)


class Unanswered(LaunchError):
    """The scheduler does not answer."""

    exit_code = EXIT_UNAVAILABLE


def found(which: JobId, scheduler: Scheduler, system: str) -> Record:
    """How its scheduler, which people call ``system``, says that a job stands.

    Raises:
        Unanswered: it says nothing.
        LaunchError: it does not know the job any more.
    """
    import shutil

    asked = scheduler.asked
    if shutil.which(asked) is None:
        raise Unanswered(f"{asked} is not on PATH: this machine has no commands of {system}", "type it on a login node")
    seen = scheduler.look(which)
    if seen is None:
        what = f"{asked} does not answer: the state of job {which.number} is not known"
        raise Unanswered(what, f"{'scontrol ping' if system == 'Slurm' else asked} says whether {system} is there")
    return seen


def standing(job: Submitted, which: JobId, scheduler: Scheduler | None = None) -> Record:
    """How it stands; how it ended is kept. ``scheduler`` is whom to ask, where somebody asks more than once.

    Raises:
        LaunchError: the scheduler does not answer, or neither it nor we know the job any more.
    """
    from ddplaunch.submit.queue import JobRecord

    kept = JobRecord("ENDED", "None", job.code, job.log, number=job.number, said=job.ended)
    if job.code is not None and job.scheduler != "slurm":  # Slurm may start it again
        return kept
    try:
        seen = found(which, scheduler or scheduler_of(job), SCHEDULERS[job.scheduler])
    except Unanswered:
        raise
    except LaunchError:
        if job.code is None or job.array:
            raise
        return kept
    if seen.code is not None and not job.array:
        submitted.over(job, seen.words, seen.code)
    if isinstance(seen, JobRecord) and not seen.log:
        return replace(seen, log=job.log.replace("%a", which.number.partition("_")[2]))
    return seen


def forgotten(job: Submitted) -> str:
    """Keep that it has ended and nobody knows how; return what to say about it, after "job 7"."""
    words = f"ended; {SCHEDULERS[job.scheduler]} no longer knows how"
    submitted.over(job, words, 1)
    return words


def running(job: Submitted, which: JobId, command: str) -> JobRecord:
    """How it stands, where it runs. Raises UsageError if it waits or has ended, or ``command`` cannot ask its nodes."""
    from ddplaunch.submit.queue import JobRecord

    seen = standing(job, which)
    if seen.code is not None:
        raise UsageError(f"job {which.number} {seen.words}", f"ddplaunch report {which.number}")
    if seen.waits or (isinstance(seen, JobRecord) and seen.state != "RUNNING"):
        raise UsageError(f"job {which.number} {seen.words}: no rank runs", f"ddplaunch attach {which.number} waits")
    if not isinstance(seen, JobRecord):
        what = f"{command} cannot ask the nodes of job {which.number}: only Slurm starts a command there"
        raise UsageError(what, f"log in to one of them by SSH and type it there: ddplaunch {command}")
    if job.image:
        what = f"job {which.number} runs in a container, which srun --overlap does not enter"
        raise UsageError(what, f"ddplaunch attach {which.number} shows its log")
    return seen


def run_of(job: Submitted, seen: JobRecord) -> str:
    """The name of its latest run, or how that begins, where the nodes keep the history elsewhere."""
    return kept_run(job, seen) or job.run_id or f"{seen.number}."


def kept_run(job: Submitted, seen: Record) -> str | None:
    """The name of its latest run in the history that this machine has, as where nodes share a home."""
    from ddplaunch.submit.queue import JobRecord

    number = seen.number if isinstance(seen, JobRecord) else job.number  # in an array each has its own
    return next((name for name in past.names() if _is_of(job.run_id or f"{number}.", name)), None)


def _is_of(begins: str, run: str) -> bool:
    """Whether a run is one of those whose names begin so: 77.0 and 77.1 of a job of Slurm, 77 and 77.2 of others."""
    return f"{run}.".startswith(begins)
