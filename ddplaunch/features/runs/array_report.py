"""State of a job array: a summary, and the state of each of its jobs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

import click
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.text_table import format_table
from ddplaunch.features.runs.job_resolver import check_scheduler, find_recorded_run
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import (
    ACCOUNTING_DELAY_S,
    QUICK_TIMEOUT_S,
    BatchJobState,
    JobId,
    SchedulerNotResponding,
    array_indices,
)
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import JobEnd, SubmittedJob


def summarize_array(
    job: SubmittedJob, records: Sequence[BatchJobState]
) -> tuple[str, int | None, dict[str, BatchJobState]]:
    """Return a summary, the highest exit code once all jobs have ended, and the state of each index.

    The ends of jobs are saved: ``records``, the scheduler's reply, may lack jobs that ended some time ago.
    """
    queried = {each.job.index: each for each in records if each.job and each.job.index}
    found = dict[str, BatchJobState]()
    missing = BatchJobState("has ended; exit status not known yet", ended_unknown=True, state="ended")
    if job.gone is not None and time.time() - job.gone > ACCOUNTING_DELAY_S:
        missing = BatchJobState("ended; exit status unknown", 1)
    for index in array_indices(job.array or ""):
        end = job.ends.get(index)
        saved = BatchJobState(end.words, end.code) if end else None
        found[index] = queried.get(index) or saved or missing
    waiting = {True: "pending", False: "running"}
    counts = Counter(
        each.state or waiting[each.is_pending] if each.code is None else "failed" if each.code else "completed"
        for each in found.values()
    )
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    ends = {index: JobEnd(each.description, each.code) for index, each in found.items() if each.code is not None}
    code = max(end.code for end in ends.values()) if len(ends) == len(found) else None
    gone = job.gone or time.time() if missing in found.values() else None
    if (ends, gone) != (job.ends, job.gone):
        submitted_jobs.save_job(replace(job, ends=ends, ended=None if code is None else words, code=code, gone=gone))
    return words, code, found


def query_array(job: SubmittedJob) -> tuple[str, int | None, dict[str, BatchJobState]]:
    """Query the scheduler about an array that has not ended; return what ``summarize_array`` does.

    Raises SchedulerNotResponding if it does not answer, and JobForgotten.
    """
    records: Sequence[BatchJobState] = ()
    if job.code is None:
        which, scheduler = JobId(job.number, job.cluster, ""), check_scheduler(get_scheduler(job), job.cluster)
        replies = scheduler.query([which], QUICK_TIMEOUT_S)
        if replies is None:
            what = f"{scheduler.query_program} does not answer: the state of job {job.number} is not known"
            raise SchedulerNotResponding(what)
        records = replies.get(which, ())
        if not (records or job.ends):
            raise scheduler.forgotten_error(which)
    return summarize_array(job, records)


def print_array(job: SubmittedJob, *, as_json: bool) -> None:
    """Print the summary and the state of each job. Raises LaunchError as ``query_array`` does."""
    words, code, found = query_array(job)
    rows = []
    for index, each in found.items():
        number = each.number or JobId(job.number, index=index).text
        run = find_recorded_run(job, replace(each, number=number))
        rows.append((index, each, run, job.log_paths(index)[0] or each.log_path))
    if as_json:
        jobs = [
            {"index": int(index), "state": each.description, "code": each.code, "run": run, "log": log}
            for index, each, run, log in rows
        ]
        return click.echo(json.dumps({"job": job.number, "state": words, "code": code, "jobs": jobs}, indent=2))
    click.echo(f"job {job.number}, array {job.array}: {words}")
    cells = [(index, each.description.removeprefix("is "), log or "-") for index, each, _, log in rows]
    for line in format_table(("INDEX", "STATE", "LOG"), cells):
        click.echo(line)
    return click.echo(f"one of them: ddplaunch report {JobId(job.number, index='INDEX').text}")


def page_not_supported(job: SubmittedJob, page: str) -> UsageError:
    """Return the error for ``--html`` or ``--serve`` (``page``) with a whole array."""
    what = f"{page}: job {job.number} is an array of --array {job.array}"
    return UsageError(what, f"name one by its index: ddplaunch report {JobId(job.number, index='INDEX').text}")
