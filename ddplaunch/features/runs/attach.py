"""``ddplaunch attach``: follows a submitted batch job to its end, from any shell."""

from __future__ import annotations

import re

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.cli.lookup.batch_jobs import (
    find_slurm,
    find_unrecorded_job,
    job_state,
    query_state,
    resolve_job_id,
)
from ddplaunch.cli.lookup.job_command import RunName
from ddplaunch.cli.lookup.remote_jobs import RemoteJob, list_remote_jobs
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.log_follower import LogFollower, follow_job
from ddplaunch.system.schedulers.scheduler import JobForgotten, JobId, SchedulerNotResponding
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

INITIAL_LOG_BYTES = 64 << 10  # of the end of the log, shown first
INITIAL_LINES = 1000  # the last lines of each Kubernetes pod's log, shown first


@click.command()
@click.argument("job", required=False, metavar="[JOB]", type=RunName())
def attach(job: str | None) -> int:
    """Follow the log of a submitted job to its end and return its exit code.

    JOB is its number, NUMBER_INDEX in an array, or its name. Default: the job submitted last. Any of your Slurm jobs
    works, and any job of Kubernetes. Shows the last 64 KiB of the log (of each pod the last 1000 lines), then new
    output. Ctrl-C asks whether to cancel the job or detach; without a terminal it detaches.
    """
    known = submitted_jobs.find_job(job) if job is not None else next(iter(submitted_jobs.list_jobs()), None)
    if elsewhere := _find_job_elsewhere(job, known):
        return elsewhere.start_on_first_host(["attach", elsewhere.name_on_host(job or elsewhere.run_id)])()
    if known is None:
        if job is None:
            raise UsageError("no submitted job is on record", "ddplaunch attach NUMBER takes any job of Slurm")
        if (known := find_unrecorded_job(job)) is None:
            return _attach_to_slurm_job(job)
    which = resolve_job_id(known, job or known.number, "attach")
    scheduler = get_scheduler(known)
    seen = job_state(known, which, scheduler)
    files = (seen.log_path, seen.stderr_path)
    follower = LogFollower(which, scheduler, files, INITIAL_LOG_BYTES, INITIAL_LINES)
    if seen.code is not None:
        return follower.finish(seen)
    return follow_job(follower, seen.log_path or known.log or f"ddplaunch logs {known.number}", known)


def _find_job_elsewhere(word: str | None, known: SubmittedJob | None) -> RemoteJob | None:
    """Return the job to attach to, if it was submitted on a login node; ``known``: the job submitted here, if any."""
    jobs = [each for each in list_remote_jobs() if each.is_submitted]
    if word is None:
        return next((each for each in jobs[:1] if known is None or known.moment < each.began), None)
    return None if known else next((each for each in jobs if each.matches_exactly(word)), None)


def _attach_to_slurm_job(word: str) -> int:
    """Follow a job of Slurm that was not submitted by ddplaunch."""
    if not re.fullmatch(r"\d+(_\d+)?", word):
        raise UsageError(f'no submitted job named "{sanitize_line(word, 60)}"', "ddplaunch ps lists your jobs")
    if (slurm := find_slurm()) is None:
        what = f"job {word} was not submitted here, and scontrol is not on PATH"
        hint = "run this on a login node of Slurm; ddplaunch ps lists the jobs that were submitted here"
        raise SchedulerNotResponding(what, hint)
    number, _, index = word.partition("_")
    job = JobId(number, index=index or None)
    try:
        query_state(job, slurm)  # raises at once if Slurm does not respond
    except JobForgotten:
        hint = "squeue --me lists your jobs, and sacct those that ended long ago"
        raise UsageError(f"Slurm does not know job {word}, and it was not submitted here", hint) from None
    return follow_job(LogFollower(job, slurm, last=INITIAL_LOG_BYTES), f"scontrol show job {word} names it")
