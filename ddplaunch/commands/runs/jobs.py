"""How the jobs of schedulers stand: those are asked about jobs that have not ended, and Slurm's nodes too."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddplaunch.clusters.systems.slurm import JOB_ID
from ddplaunch.commands.runs.array import summarize_array
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.queue import submitted
from ddplaunch.queue.meant import mark_forgotten, of_scripts
from ddplaunch.queue.scheduler import ACCOUNTING_DELAY_S, BatchJobState, Deadline, JobId
from ddplaunch.queue.step import query_node_zero
from ddplaunch.queue.submitted import SubmittedJob
from ddplaunch.queue.table import make_scheduler, scheduler_of

MAX_RECENT = 5  # runs that have ended, and as many submitted jobs, that are shown without --all
RECENT_S = 86400.0  # seconds
QUERY_TIMEOUT_S = 10.0  # seconds for all that is asked
MAX_CONCURRENT_STEPS = 8  # jobs whose nodes are asked: each is a step of Slurm's


@dataclass(frozen=True)
class QueuedJob:
    """How a submitted job stands."""

    job: SubmittedJob
    description: str  # what to say about it, after "job 7"
    code: int | None  # its exit code; None while it runs or waits
    seen: BatchJobState | None  # what its scheduler says of it; None where that is not known
    world_size: int | None = None  # both None where its node 0 was not asked, or does not answer
    rate: float | None = None  # collectives a second


def list_queued_jobs(now: float, *, everything: bool) -> list[QueuedJob]:
    """The jobs that wait or run, and those that have ended lately; ``everything``: all that are kept.

    None within a job, which is where we ask for what runs there.
    """
    if os.environ.get(JOB_ID):
        return []
    deadline = Deadline(QUERY_TIMEOUT_S)
    jobs = submitted.list_jobs()
    told = dict[tuple[str, JobId], QueuedJob]()
    for name in dict.fromkeys(job.scheduler for job in jobs if job.code is None):
        told |= _query_scheduler(
            name, [job for job in jobs if job.code is None and job.scheduler == name], deadline, now
        )
    found = []
    over = 0
    for job in jobs:
        if job.code is None:
            found.append(told[job.scheduler, _id(job)])
        elif everything or (now - job.moment < RECENT_S and over < MAX_RECENT):
            over += 1
            found.append(QueuedJob(job, job.ended or "", job.code, None))
    found += _of_scripts(deadline)
    return _with_ranks(sorted(found, key=lambda each: each.job.moment, reverse=True), deadline)


def _of_scripts(deadline: Deadline) -> list[QueuedJob]:
    """The jobs that something else has submitted, where Slurm says that they have not ended."""
    jobs, slurm = of_scripts(), make_scheduler("slurm")
    answers = slurm.query([_id(job) for job in jobs], deadline.left) if jobs and not slurm.why_unavailable() else None
    records = ((job, seen) for job in jobs for seen in (answers or {}).get(_id(job), ()))
    return [QueuedJob(job, seen.description, None, seen) for job, seen in records if seen.code is None]


def _id(job: SubmittedJob) -> JobId:
    return JobId(job.number, job.cluster, "" if job.array else None)


def _query_scheduler(
    name: str, jobs: Sequence[SubmittedJob], deadline: Deadline, now: float
) -> Mapping[tuple[str, JobId], QueuedJob]:
    """Ask one scheduler about all of its jobs at once."""
    asked = make_scheduler(name)
    why = asked.why_unavailable(jobs[0].cluster)
    told = None if why else asked.query(list(map(_id, jobs)), deadline.left)
    if told is None:
        silent = why or f"{asked.query_program} does not answer"
        return {(name, _id(job)): QueuedJob(job, silent, None, None) for job in jobs}
    return {(name, _id(job)): _to_queued_job(job, told.get(_id(job), ()), now) for job in jobs}


def _to_queued_job(job: SubmittedJob, records: Sequence[BatchJobState], now: float) -> QueuedJob:
    if job.array:
        return QueuedJob(job, *summarize_array(job, records)[:2], None)
    if not records:
        return QueuedJob(job, mark_forgotten(job), 1, None)
    seen = records[0]
    if seen.code is not None:
        submitted.save_end(job, None, seen.description, seen.code)
    elif seen.ended_unknown and job.gone is None:
        submitted.save_job(replace(job, gone=now))
    elif seen.ended_unknown and job.gone and now - job.gone > ACCOUNTING_DELAY_S:
        return QueuedJob(job, mark_forgotten(job), 1, None)
    return QueuedJob(job, seen.description, seen.code, seen)


def _with_ranks(found: Sequence[QueuedJob], deadline: Deadline) -> list[QueuedJob]:
    """Ask those of Slurm that run, all at once, for their ranks and how fast they are."""
    told: dict[str, tuple[int | None, float | None]] = {}

    def look_inside(job: SubmittedJob, seen: BatchJobState) -> None:
        with suppress(ValueError):  # the site has printed something else
            for run in json.loads(query_node_zero(job, seen, ["ps", "--json"], deadline.left) or "[]"):
                if str(run["run"]).startswith(job.run_prefix) and run["ended"] is None:
                    told[job.number] = (run["world_size"], run["collectives_per_second"])

    threads = [
        threading.Thread(target=look_inside, args=(each.job, each.seen), daemon=True)
        for each in found
        if each.seen and each.seen.is_running and scheduler_of(each.job).allows_overlapping_steps and not each.job.image
    ][:MAX_CONCURRENT_STEPS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        replace(each, world_size=told[each.job.number][0], rate=told[each.job.number][1])
        if each.job.number in told
        else each
        for each in found
    ]
