"""An array of submitted jobs: how each of them stands, and all of them in a few words."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

import click

from ddplaunch.console.table import format_table
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.queue import submitted
from ddplaunch.queue.meant import check_scheduler, find_kept_run
from ddplaunch.queue.scheduler import (
    ACCOUNTING_DELAY_S,
    QUICK_TIMEOUT_S,
    BatchJobState,
    JobId,
    SchedulerNotResponding,
    array_indices,
)
from ddplaunch.queue.submitted import JobEnd, SubmittedJob
from ddplaunch.queue.table import scheduler_of


def summarize_array(
    job: SubmittedJob, records: Sequence[BatchJobState]
) -> tuple[str, int | None, dict[str, BatchJobState]]:
    """All in words, our exit code once all have ended (the highest), and each index. What has ended is kept.

    ``records`` is what the scheduler says: of some that have ended it may say nothing more.
    """
    told = {each.job.index: each for each in records if each.job and each.job.index}
    found = dict[str, BatchJobState]()
    missing = BatchJobState("has ended; exit status not known yet", ended_unknown=True, state="ended")
    if job.gone is not None and time.time() - job.gone > ACCOUNTING_DELAY_S:
        missing = BatchJobState("ended; exit status unknown", 1)
    for index in array_indices(job.array or ""):
        end = job.ends.get(index)
        kept = BatchJobState(end.words, end.code) if end else None
        found[index] = told.get(index) or kept or missing
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
        submitted.save_job(replace(job, ends=ends, ended=None if code is None else words, code=code, gone=gone))
    return words, code, found


def print_array(job: SubmittedJob, *, as_json: bool) -> None:
    """Print how all stand, and each. Raises SchedulerNotResponding if the scheduler does not say it."""
    records: Sequence[BatchJobState] = ()
    if job.code is None:
        which, scheduler = JobId(job.number, job.cluster, ""), check_scheduler(scheduler_of(job), job.cluster)
        told = scheduler.query([which], QUICK_TIMEOUT_S)
        if told is None:
            raise SchedulerNotResponding(
                f"{scheduler.query_program} does not answer: the state of job {job.number} is not known"
            )
        records = told.get(which, ())
        if not (records or job.ends):
            raise scheduler.forgotten_error(which)
    words, code, found = summarize_array(job, records)
    rows = []
    for index, each in found.items():
        number = each.number or JobId(job.number, index=index).text
        rows.append(
            (index, each, find_kept_run(job, replace(each, number=number)), job.log_paths(index)[0] or each.log_path)
        )
    if as_json:
        told_of = [
            {"index": int(index), "state": each.description, "code": each.code, "run": run, "log": log}
            for index, each, run, log in rows
        ]
        return click.echo(json.dumps({"job": job.number, "state": words, "code": code, "jobs": told_of}, indent=2))
    click.echo(f"job {job.number}, array {job.array}: {words}")
    heads = ("INDEX", "STATE", "LOG")
    for line in format_table(
        heads, [(index, each.description.removeprefix("is "), log or "-") for index, each, _, log in rows]
    ):
        click.echo(line)
    return click.echo(f"one of them: ddplaunch report {JobId(job.number, index='INDEX').text}")


def page_not_supported(job: SubmittedJob, page: str) -> UsageError:
    """The error of ``--html`` or ``--serve``, which ``page`` is, for all of an array."""
    what = f"{page}: job {job.number} is an array of --array {job.array}"
    return UsageError(what, f"name one by its index: ddplaunch report {JobId(job.number, index='INDEX').text}")
