"""Waits for the end of a batch job, or of all jobs of an array, by querying its scheduler."""

from __future__ import annotations

import time

import click

from ddplaunch.cli.lookup.batch_jobs import job_state, parse_array_index
from ddplaunch.cli.lookup.job_arrays import query_array
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.log_follower import MAX_QUERY_INTERVAL_S, MIN_QUERY_INTERVAL_S, print_line
from ddplaunch.system.schedulers.outage_notice import OutageNotice
from ddplaunch.system.schedulers.scheduler import JobId, Scheduler, SchedulerNotResponding
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob


def wait_for_job(job: SubmittedJob, word: str) -> int:
    """Wait until the job that ``word`` names has ended; return its exit code, the highest one of an array.

    Raises LaunchError if its scheduler does not answer the first query, or no longer knows the job.
    """
    which, scheduler = JobId(job.number, job.cluster, parse_array_index(job, word)), get_scheduler(job)
    words, code = _query(job, which, scheduler)
    interval, outage = MIN_QUERY_INTERVAL_S, OutageNotice(scheduler.title, which.text)
    while code is None:
        time.sleep(interval)
        interval = min(interval * 1.25, MAX_QUERY_INTERVAL_S)
        answered = True
        try:
            words, code = _query(job, which, scheduler)
        except SchedulerNotResponding:  # schedulers restart now and then; the job is not affected
            answered = False
        if notice := outage.update(answered=answered):
            print_line(notice)
    click.echo(f"job {which.text}{':' if which.index == '' else ''} {words}", err=True)
    return code


def _query(job: SubmittedJob, which: JobId, scheduler: Scheduler) -> tuple[str, int | None]:
    """Return the state of a job in words, and its exit code once all of it has ended."""
    if which.index == "":
        job = submitted_jobs.find_job(job.number) or job  # each query stores the ends of indices
        return query_array(job)[:2]
    seen = job_state(job, which, scheduler)
    return seen.description, seen.code
