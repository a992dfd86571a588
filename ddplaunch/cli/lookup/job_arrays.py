"""State of a job array: a summary, and the state of each of its jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.cli.lookup.batch_jobs import check_scheduler, not_responding_error
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import (
    ACCOUNTING_DELAY_S,
    QUICK_TIMEOUT_S,
    BatchJobState,
    JobId,
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
    states = dict[str, BatchJobState]()
    missing = BatchJobState("has ended; exit status not known yet", ended_unknown=True, state="ended")
    if job.gone is not None and time.time() - job.gone > ACCOUNTING_DELAY_S:
        missing = BatchJobState("ended; exit status unknown", 1)
    for index in array_indices(job.array or ""):
        end = job.ends.get(index)
        saved = BatchJobState(end.words, end.code) if end else None
        states[index] = queried.get(index) or saved or missing
    waiting = {True: "pending", False: "running"}
    counts = Counter(
        each.state or waiting[each.is_pending] if each.code is None else "failed" if each.code else "completed"
        for each in states.values()
    )
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    ends = {index: JobEnd(each.description, each.code) for index, each in states.items() if each.code is not None}
    code = max(end.code for end in ends.values()) if len(ends) == len(states) else None
    gone = job.gone or time.time() if missing in states.values() else None
    if (ends, gone) != (job.ends, job.gone):
        submitted_jobs.save_job(replace(job, ends=ends, ended=None if code is None else words, code=code, gone=gone))
    return words, code, states


def query_array(job: SubmittedJob) -> tuple[str, int | None, dict[str, BatchJobState]]:
    """Query the scheduler about an array that has not ended; return the result of ``summarize_array``.

    Raises SchedulerNotResponding if it does not answer, and JobForgotten.
    """
    records: Sequence[BatchJobState] = ()
    if job.code is None:
        which, scheduler = JobId(job.number, job.cluster, ""), check_scheduler(get_scheduler(job), job.cluster)
        replies = scheduler.query([which], QUICK_TIMEOUT_S)
        if replies is None:
            raise not_responding_error(which, scheduler)
        records = replies.get(which, ())
        if not (records or job.ends):
            raise scheduler.forgotten_error(which)
    return summarize_array(job, records)
