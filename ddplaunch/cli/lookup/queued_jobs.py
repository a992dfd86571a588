"""State of submitted batch jobs: queries the schedulers about jobs that have not ended, and node 0 of Slurm jobs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.cli.lookup.batch_jobs import find_slurm, list_foreign_slurm_jobs, mark_forgotten
from ddplaunch.cli.lookup.job_arrays import summarize_array
from ddplaunch.system.clusters.systems.slurm_env import JOB_ID
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.job_step import query_node_zero
from ddplaunch.system.schedulers.scheduler import ACCOUNTING_DELAY_S, BatchJobState, Deadline, JobId
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler, make_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

MAX_RECENT = 5  # ended runs, and as many ended jobs, shown without --all
RECENT_S = 86400.0
QUERY_TIMEOUT_S = 10.0  # for all queries together
MAX_CONCURRENT_STEPS = 8  # jobs whose node 0 is queried: each query is a step of Slurm


class QueuedJob(Struct, frozen=True):
    """A submitted job and its state."""

    job: SubmittedJob
    description: str  # the state in words, after "job 7"
    code: int | None  # its exit code; None while it runs or waits
    seen: BatchJobState | None  # the scheduler's reply; None if unknown
    world_size: int | None = None  # both None if node 0 was not queried, or did not reply
    rate: float | None = None  # collectives per second


def list_queued_jobs(now: float, *, everything: bool) -> list[QueuedJob]:
    """List the jobs that wait or run, and recently ended ones; ``everything``: all on record.

    Returns no job within a batch job: there this command runs to report the runs of that job.
    """
    if os.environ.get(JOB_ID):
        return []
    deadline = Deadline(QUERY_TIMEOUT_S)
    jobs = submitted_jobs.list_jobs()
    states = _query_states(jobs, deadline, now)
    listed = []
    over = 0
    for job in jobs:
        if job.code is None:
            listed.append(states[job.scheduler, _job_id(job)])
        elif everything or (now - job.moment < RECENT_S and over < MAX_RECENT):
            over += 1
            listed.append(QueuedJob(job, job.ended or "", job.code, None))
    listed += _list_foreign_slurm_jobs(deadline)
    return _query_world_sizes(sorted(listed, key=lambda each: each.job.moment, reverse=True), deadline)


def list_ended(jobs: Sequence[SubmittedJob], now: float) -> list[SubmittedJob]:
    """Return those of these jobs that have ended; a job whose scheduler does not answer may still run."""
    states = _query_states(jobs, Deadline(QUERY_TIMEOUT_S), now)
    return [job for job in jobs if job.code is not None or states[job.scheduler, _job_id(job)].code is not None]


def _list_foreign_slurm_jobs(deadline: Deadline) -> list[QueuedJob]:
    """List the Slurm jobs that have launchers, were not submitted by ddplaunch and have not ended."""
    if not (jobs := list_foreign_slurm_jobs()) or (slurm := find_slurm()) is None:
        return []
    answers = None if slurm.why_unavailable() else slurm.query([_job_id(job) for job in jobs], deadline.left)
    records = ((job, seen) for job in jobs for seen in (answers or {}).get(_job_id(job), ()))
    return [QueuedJob(job, seen.description, None, seen) for job, seen in records if seen.code is None]


def _job_id(job: SubmittedJob) -> JobId:
    return JobId(job.number, job.cluster, "" if job.array else None)


def _query_states(
    jobs: Sequence[SubmittedJob], deadline: Deadline, now: float
) -> Mapping[tuple[str, JobId], QueuedJob]:
    """Query the schedulers about the jobs that are not known to have ended; each once, about all of its jobs."""
    states = dict[tuple[str, JobId], QueuedJob]()
    left = [job for job in jobs if job.code is None]
    for name in dict.fromkeys(job.scheduler for job in left):
        states |= _query_scheduler(name, [job for job in left if job.scheduler == name], deadline, now)
    return states


def _query_scheduler(
    name: str, jobs: Sequence[SubmittedJob], deadline: Deadline, now: float
) -> Mapping[tuple[str, JobId], QueuedJob]:
    """Query one scheduler about all of its jobs at once."""
    scheduler = make_scheduler(name)
    why = scheduler.why_unavailable(jobs[0].cluster)
    replies = None if why else scheduler.query(list(map(_job_id, jobs)), deadline.left)
    if replies is None:
        text = why or f"{scheduler.query_program} does not answer"
        return {(name, _job_id(job)): QueuedJob(job, text, None, None) for job in jobs}
    return {(name, _job_id(job)): _to_queued_job(job, replies.get(_job_id(job), ()), now) for job in jobs}


def _to_queued_job(job: SubmittedJob, records: Sequence[BatchJobState], now: float) -> QueuedJob:
    if job.array:
        return QueuedJob(job, *summarize_array(job, records)[:2], None)
    if not records:
        return QueuedJob(job, mark_forgotten(job), 1, None)
    seen = records[0]
    if seen.code is not None:
        submitted_jobs.save_end_if_known(job, _job_id(job), seen)
    elif seen.ended_unknown and job.gone is None:
        submitted_jobs.save_job(replace(job, gone=now))
    elif seen.ended_unknown and job.gone and now - job.gone > ACCOUNTING_DELAY_S:
        return QueuedJob(job, mark_forgotten(job), 1, None)
    return QueuedJob(job, seen.description, seen.code, seen)


def _query_world_sizes(jobs: Sequence[QueuedJob], deadline: Deadline) -> list[QueuedJob]:
    """Query node 0 of running jobs, all at the same time, for world size and collectives per second."""
    replies: dict[str, tuple[int | None, float | None]] = {}

    def query_node(job: SubmittedJob, seen: BatchJobState) -> None:
        with suppress(ValueError, TypeError, LookupError):  # the site's scripts may have printed something else
            for run in json.loads(query_node_zero(job, seen, ["ps", "--json"], deadline.left) or "[]"):
                if str(run["run"]).startswith(job.run_prefix) and run["ended"] is None:
                    replies[job.number] = (run["world_size"], run["collectives_per_second"])

    running = [(each.job, each.seen) for each in jobs if each.seen and each.seen.is_running and not each.job.image]
    reached = [each for each in running if get_scheduler(each[0]).allows_overlapping_steps][:MAX_CONCURRENT_STEPS]
    threads = [threading.Thread(target=query_node, args=each, daemon=True) for each in reached]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = [(each, *replies.get(each.job.number, (None, None))) for each in jobs]
    return [replace(each, world_size=world_size, rate=rate) for each, world_size, rate in known]
