"""An array of submitted jobs: how each of them stands, and all of them in a few words."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

import click

from ddplaunch.console.table import table
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError
from ddplaunch.queue import submitted
from ddplaunch.queue.meant import asked, kept_run
from ddplaunch.queue.scheduler import ACCOUNTED_AFTER, SOON, JobId, JobState, SilentScheduler, indices
from ddplaunch.queue.submitted import JobEnd, Submitted
from ddplaunch.queue.table import scheduler_of


def told_of_all(job: Submitted, records: Sequence[JobState]) -> tuple[str, int | None, dict[str, JobState]]:
    """All in words, our exit code once all have ended (the highest), and each index. What has ended is kept.

    ``records`` is what the scheduler says: of some that have ended it may say nothing more.
    """
    told = {each.job.index: each for each in records if each.job and each.job.index}
    found = dict[str, JobState]()
    missing = JobState("has ended; nobody says how yet", gone=True, state="ended")
    if job.gone is not None and time.time() - job.gone > ACCOUNTED_AFTER:
        missing = JobState("ended; nobody knows how", 1)
    for index in indices(job.array or ""):
        end = job.ends.get(index)
        kept = JobState(end.words, end.code) if end else None
        found[index] = told.get(index) or kept or missing
    waiting = {True: "pending", False: "running"}
    counts = Counter(
        each.state or waiting[each.waits] if each.code is None else "failed" if each.code else "completed"
        for each in found.values()
    )
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    ends = {index: JobEnd(each.words, each.code) for index, each in found.items() if each.code is not None}
    code = max(end.code for end in ends.values()) if len(ends) == len(found) else None
    gone = job.gone or time.time() if missing in found.values() else None
    if (ends, gone) != (job.ends, job.gone):
        submitted.keep(replace(job, ends=ends, ended=None if code is None else words, code=code, gone=gone))
    return words, code, found


def report(job: Submitted, *, as_json: bool) -> None:
    """Print how all stand, and each. Raises SilentScheduler if the scheduler does not say it."""
    records: Sequence[JobState] = ()
    if job.code is None:
        which, scheduler = JobId(job.number, job.cluster, ""), asked(scheduler_of(job), job.cluster)
        told = scheduler.ask([which], SOON)
        if told is None:
            raise SilentScheduler(f"{scheduler.asks} does not answer: the state of job {job.number} is not known")
        records = told.get(which, ())
        if not (records or job.ends):
            raise scheduler.forgotten(which)
    words, code, found = told_of_all(job, records)
    rows = []
    for index, each in found.items():
        number = each.number or JobId(job.number, index=index).typed
        rows.append((index, each, kept_run(job, replace(each, number=number)), job.files(index)[0] or each.log))
    if as_json:
        told_of = [
            {"index": int(index), "state": each.words, "code": each.code, "run": run, "log": log}
            for index, each, run, log in rows
        ]
        return click.echo(json.dumps({"job": job.number, "state": words, "code": code, "jobs": told_of}, indent=2))
    click.echo(f"job {job.number}, array {job.array}: {words}")
    heads = ("INDEX", "STATE", "LOG")
    for line in table(heads, [(index, each.words.removeprefix("is "), log or "-") for index, each, _, log in rows]):
        click.echo(line)
    return click.echo(f"one of them: ddplaunch report {JobId(job.number, index='INDEX').typed}")


def refuse_page(job: Submitted, page: str) -> UsageError:
    """The error of ``--html`` or ``--serve``, which ``page`` is, for all of an array."""
    what = f"{page}: job {job.number} is an array of --array {job.array}"
    return UsageError(what, f"name one by its index: ddplaunch report {JobId(job.number, index='INDEX').typed}")
