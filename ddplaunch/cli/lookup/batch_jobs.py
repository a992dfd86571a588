"""Finds the batch job that a word of a command line names, and queries its state."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError, UsageError, host_name, sanitize_line
from ddplaunch.cli.lookup import running_jobs
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord, RunState
from ddplaunch.system.schedulers import scheduler_registry, submitted_jobs
from ddplaunch.system.schedulers.job_step import run_on_nodes
from ddplaunch.system.schedulers.scheduler import (
    QUICK_TIMEOUT_S,
    BatchJobState,
    JobForgotten,
    JobId,
    Scheduler,
    SchedulerNotResponding,
    array_indices,
)
from ddplaunch.system.schedulers.scheduler_registry import SCHEDULER_TITLES, get_scheduler, make_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob


class RunningBatchJob(NamedTuple):
    """A running job of a batch scheduler, whose launchers are on other machines."""

    job: SubmittedJob
    state: BatchJobState
    run: str  # the name of its latest run, or the beginning of that name

    def run_command(self, command: str, options: Sequence[str], *, everywhere: bool = False) -> int:
        """Run a command for this run on node 0, or on all nodes, pass on its output, and return its exit code."""
        return run_on_nodes(self.job, self.state, [command, self.run, *options], everywhere=everywhere)


def find_running_batch_job(word: str | None, command: str) -> RunningBatchJob | None:
    """Find the running batch job that ``word`` names, see ``find_batch_job``; messages name ``command``.

    Raises LaunchError if that job does not run, or its scheduler does not answer.
    """
    if word is None or (job := find_batch_job(word)) is None:
        return None
    return require_running(job, resolve_job_id(job, word, command))


def find_batch_job(word: str | None) -> SubmittedJob | None:
    """Return the batch job that ``word`` names; None if it names a run on this machine, or nothing known.

    Raises UsageError for an index that its array does not have.
    """
    if word is None:
        return None
    job = submitted_jobs.find_job(word) or _find_slurm_job(word) or find_unrecorded_job(word)
    if job is None or (history_store.is_recorded_run(word) and not _has_prefix(job.run_prefix, word)):
        return None
    index = parse_array_index(job, word)
    if index == "":
        return job  # the last job of a Slurm array has the array's number, but is not the whole array
    if index is not None and job.array and index not in array_indices(job.array):
        what = f"job {job.number} has no index {sanitize_line(index, 60)}: it is an array of --array {job.array}"
        raise UsageError(what, f"ddplaunch report {job.number} lists its indices")
    prefix = f"{job.run_prefix}{index}." if index and job.run_prefix.endswith("_") else job.run_prefix
    running = [] if word in job.runs else running_jobs.list_running()
    if any(word == str(run.pid) or _has_prefix(prefix, run.run_id) for run in running):
        return None  # this is a node of the job: use the local run
    return job


def find_slurm() -> Scheduler | None:
    """Return Slurm, if this installation supports it and its commands are on this machine."""
    return make_scheduler("slurm") if _has_slurm() else None


def _has_slurm() -> bool:
    """Whether Slurm is available here, checked without the slow import of its module."""
    return "slurm" in SCHEDULER_TITLES and shutil.which("scontrol") is not None


def _find_slurm_job(word: str) -> SubmittedJob | None:
    """Return a running or pending Slurm job that the user submitted without ``ddplaunch submit``.

    Return an array even if all its jobs have ended: its last job has its number, but is not the whole array.
    """
    number, _, index = word.partition("_")
    if not (number.isdecimal() and index.isdecimal() >= bool(index)) or (slurm := find_slurm()) is None:
        return None
    if any(word == str(run.pid) for run in running_jobs.list_running()) or slurm.why_unavailable():
        return None
    try:
        state = slurm.query_one(JobId(number, index=index or None), QUICK_TIMEOUT_S)
    except LaunchError:
        return None
    states, array, whole = [state] if state else [], None, JobId(number, index="")
    if state and state.job and state.job.number == number and not index:  # it shows only the first of an array
        states = [*(slurm.query([whole], QUICK_TIMEOUT_S) or {}).get(whole, ())]
        array = ",".join(sorted((each.job.index or "" for each in states if each.job), key=int))
    if state is None or not (array or any(each.is_running or each.is_pending for each in states)):
        return None
    of = number if array else state.number
    unknown = SubmittedJob(
        number=of, cluster=None, name=word, target="", nodes=1, array=array or None, cwd="", log="", run_id=None,
        python=sys.executable, image=None, moment=0.0,
    )  # fmt: skip
    found = unknown if array else next((job for job in list_foreign_slurm_jobs() if job.number == of), unknown)
    # ``moment`` is 0, so that earlier runs of the job are found too.
    return replace(found, name=word, log="" if array else state.log_path or "", errors=state.stderr_path, moment=0.0)


def find_unrecorded_job(word: str) -> SubmittedJob | None:
    """Find a job that is not on record, by its name; None if the name of a run on this machine contains the word."""
    finders = [name for name, may_find in scheduler_registry.JOB_FINDERS.items() if may_find()]
    if not finders:
        return None
    running = running_jobs.list_running()
    names = [*history_store.list_runs(), *(run.run_id for run in running), *(str(run.pid) for run in running)]
    if any(word in name for name in names):  # the local run is meant, and a cluster may be slow to answer
        return None
    return next(filter(None, (make_scheduler(name).find_unrecorded_job(word) for name in finders)), None)


def list_foreign_slurm_jobs() -> list[SubmittedJob]:
    """List Slurm jobs submitted without ``ddplaunch submit`` that, by the history, still run on other machines."""
    if not _has_slurm():
        return []
    known, jobs = {job.number for job in submitted_jobs.list_jobs()}, dict[str, SubmittedJob]()
    for run in history_store.read_unfinished_records():
        if run.fate is RunState.RUNNING and run.host != host_name() and run.job and run.job not in known | {*jobs}:
            jobs[run.job] = SubmittedJob(
                number=run.job, cluster=None, name=run.run, target=run.target, nodes=run.nnodes, array=None,
                cwd=run.cwd, log="", run_id=run.run_id, python=sys.executable, image=None, moment=run.began,
            )  # fmt: skip
    return [*jobs.values()]


def parse_array_index(job: SubmittedJob, word: str) -> str | None:
    """Return the array index that ``word`` names, "" for the whole array; None if the job is not an array."""
    if job.array is None:
        return None
    if word in job.runs:
        return str(job.runs.index(word))
    return "" if word == job.name else word.partition("_")[2].partition(".")[0]


def resolve_job_id(job: SubmittedJob, word: str, command: str) -> JobId:
    """Return the scheduler's id of the job. Raises UsageError for an array without an index."""
    index = parse_array_index(job, word)
    if index == "":
        what = f"job {job.number} is an array of --array {job.array}"
        raise UsageError(what, f"name one by its index: ddplaunch {command} {job.number.partition('.')[0]}_INDEX")
    return JobId(job.number, job.cluster, index)


def check_scheduler(scheduler: Scheduler, cluster: str | None) -> Scheduler:
    """Return the scheduler. Raises SchedulerNotResponding at once if it has no commands here or is down."""
    if shutil.which(scheduler.query_program) is None:
        what = f"{scheduler.query_program} is not on PATH: this machine has no commands of {scheduler.title}"
        raise SchedulerNotResponding(what, scheduler.missing_hint)
    if why := scheduler.why_unavailable(cluster):
        raise SchedulerNotResponding(why, "no job is affected; try again when it is back")
    return scheduler


def query_state(which: JobId, scheduler: Scheduler) -> BatchJobState:
    """Query the scheduler for the state of a job.

    Raises:
        SchedulerNotResponding: no answer in time.
        JobForgotten: it no longer knows the job.
    """
    state = check_scheduler(scheduler, which.cluster).query_one(which, QUICK_TIMEOUT_S)
    if state is None:
        raise not_responding_error(which, scheduler)
    return state


def not_responding_error(which: JobId, scheduler: Scheduler) -> SchedulerNotResponding:
    """Return the error for a scheduler that has not answered in time about a job."""
    what = f"{scheduler.query_program} does not answer: the state of job {which.text} is unknown"
    ping = scheduler.ping_command or scheduler.query_program
    return SchedulerNotResponding(what, f"{ping} shows whether {scheduler.title} is up")


def job_state(job: SubmittedJob, which: JobId, scheduler: Scheduler | None = None) -> BatchJobState:
    """Return the state of a job: the stored one if it has ended for good, else the scheduler's; store how it ended.

    ``scheduler``: pass it to make it only once for several queries.
    Raises LaunchError if the scheduler does not answer, or neither it nor the record knows how the job ended.
    """
    scheduler = scheduler or get_scheduler(job)
    stored = None
    log, errors = job.log_paths(which.index)
    if end := job.get_end(which.index):
        stored = BatchJobState(
            end.words, end.code, job=which, number=which.text, log_path=log, stderr_path=errors,
            last_lines=job.last_lines,
        )  # fmt: skip
    if stored and not scheduler.can_requeue:
        return stored
    try:
        state = query_state(which, scheduler)
    except JobForgotten:
        if stored is None:
            raise
        return stored
    submitted_jobs.save_end_if_known(job, which, state)
    if log is None or "%" not in log:  # with a % in it, the path that Slurm reports is wrong
        log, errors = state.log_path or log, state.stderr_path or errors
    return replace(state, log_path=log, stderr_path=errors)


def find_final_state(shares: Sequence[RunRecord]) -> BatchJobState | None:
    """Return the final state of a run's batch job from its scheduler, if the records still show the run as running.

    None if the job still runs, or no scheduler is known to have it. A job that waits to start again counts as ended.
    Raises SchedulerNotResponding if its scheduler does not answer.
    """
    word = shares[0].job if shares else None
    if not word or not any(map(_runs_elsewhere, shares)):
        return None
    job = submitted_jobs.find_job(word)
    if job and job.moment <= shares[0].began:
        which = JobId(job.number, job.cluster, parse_array_index(job, word))
        try:
            state = job_state(job, which)
        except JobForgotten:
            state = BatchJobState(mark_forgotten(job, which.index), 1)
    else:  # a script of the user's own
        number, _, index = word.partition("_")
        if not number.isdecimal() or (slurm := find_slurm()) is None:
            return None
        try:
            state = query_state(JobId(number, index=index or None), slurm)
        except JobForgotten:  # it may belong to another cluster
            return None
        if (state.host or "").partition(".")[0] not in {each.host.partition(".")[0] for each in shares}:
            return None
    return state if state.code is not None or state.is_pending else None


def mark_lost(shares: Sequence[RunRecord], state: BatchJobState | None) -> list[RunRecord]:
    """Return the records of a run; those running on other machines are LOST if ``state`` shows the job is over."""
    over = state is not None and (state.code is not None or state.is_pending)
    return [replace(each, fate=RunState.LOST) if over and _runs_elsewhere(each) else each for each in shares]


def _runs_elsewhere(share: RunRecord) -> bool:
    return share.fate is RunState.RUNNING and share.host != host_name()


def mark_forgotten(job: SubmittedJob, index: str | None = None) -> str:
    """Store that the job has ended with an unknown result; return a description that continues "job 7 …"."""
    words = f"ended; {SCHEDULER_TITLES[job.scheduler]} no longer knows how"
    submitted_jobs.save_end(job, index, words, 1)
    return words


def require_running(job: SubmittedJob, which: JobId) -> RunningBatchJob:
    """Return a running job. Raises UsageError if it is pending or has ended."""
    state = job_state(job, which)
    if state.code is not None:
        raise UsageError(f"job {which.text} {state.description}", f"ddplaunch report {which.text}")
    if not state.is_running:
        raise UsageError(f"job {which.text} {state.description}: no rank runs", f"ddplaunch attach {which.text} waits")
    # The history may be on its nodes alone.
    return RunningBatchJob(job, state, find_recorded_run(job, state) or job.run_id or f"{state.number}.")


def no_record_error(which: JobId, seen: BatchJobState) -> LaunchError:
    """Return the error for a job that has ended without a record or log here, as one cancelled while pending."""
    what = f"job {which.text} {seen.description}; it has no record and no log on this machine"
    return LaunchError(what, "it never started, or its node has them")


def find_recorded_run(job: SubmittedJob, state: BatchJobState) -> str | None:
    """Return the name of a job's latest run in this machine's history; nodes with the same home write there too."""
    prefix = job.run_id or f"{state.number}."
    return next((name for name in history_store.list_runs() if _has_prefix(prefix, name)), None)


def find_runs_of_job(job: SubmittedJob, state: BatchJobState) -> list[RunRecord]:
    """Return all runs of a job in this machine's history, oldest first; not other jobs' runs with the same run id."""
    moments = (each.moment for each in submitted_jobs.list_jobs() if job.run_id == each.run_id)
    end = min((each for each in moments if each > job.moment), default=inf) if job.run_id else inf
    prefix, number = job.run_id or f"{state.number}.", state.number.partition(".")[0]
    runs = [
        each
        for each in history_store.read_all_records()
        if (each.job == number if each.job else _has_prefix(prefix, each.run) and job.moment <= each.began < end)
    ]
    return sorted(runs, key=lambda each: each.began)


def _has_prefix(prefix: str, run: str) -> bool:
    """Whether the name of a run, followed by a dot, begins with ``prefix``, like "77." for Slurm job 77."""
    return f"{run}.".startswith(prefix)
