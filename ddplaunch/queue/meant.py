"""The submitted job that a word means, and how it stands: for the commands that work on runs here and on jobs there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from math import inf

from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError, UsageError, host_name
from ddplaunch.job import past, runs
from ddplaunch.job.record import Fate, RunRecord
from ddplaunch.queue import submitted
from ddplaunch.queue.scheduler import SOON, Forgotten, JobId, JobState, Scheduler, SilentScheduler
from ddplaunch.queue.submitted import Submitted
from ddplaunch.queue.table import SCHEDULERS, scheduler, scheduler_of


def job_meant(word: str | None) -> Submitted | None:
    """The submitted job that ``word`` means; None where it means a run on this machine, or nothing that is known."""
    if word is None:
        return None
    job = submitted.find(word) or _of_slurm(word)
    if job is None or (past.is_kept(word) and not _is_of(job.run, word)):
        return None
    if any(word == str(run.pid) or _is_of(job.run, run.run_id) for run in runs.all_running()):
        return None  # as on its node
    return job


def _of_slurm(word: str) -> Submitted | None:
    """A job of Slurm that runs or waits, and that something else has submitted: a script of the user's own."""
    number, _, index = word.partition("_")
    slurm = scheduler("slurm")
    if not (number.isdecimal() and index.isdecimal() >= bool(index)) or shutil.which(slurm.asks) is None:
        return None
    if any(word == str(run.pid) for run in runs.all_running()) or slurm.down():
        return None
    try:
        seen = slurm.look(JobId(number, index=index or None), SOON)
    except LaunchError:
        return None
    if seen is None or not (seen.runs or seen.waits):
        return None
    unknown = Submitted(
        number=seen.number, cluster=None, name=word, target="", nodes=1, array=None, cwd="", log="", run_id=None,
        python=sys.executable, image=None, moment=0.0,
    )  # fmt: skip
    found = next((job for job in of_scripts() if job.number == seen.number), unknown)
    return replace(found, name=word, log=seen.log or "", errors=seen.errors, moment=0.0)  # it has earlier runs too


def of_scripts() -> list[Submitted]:
    """The jobs of Slurm that something else has submitted, as far as the history has runs of theirs that go on."""
    if shutil.which(scheduler("slurm").asks) is None:
        return []
    known, found = {job.number for job in submitted.every()}, dict[str, Submitted]()
    for each in past.records():
        if each.fate is Fate.RUNNING and each.host != host_name() and each.job and each.job not in known | {*found}:
            found[each.job] = Submitted(
                number=each.job, cluster=None, name=each.run, target=each.target, nodes=each.nnodes, array=None,
                cwd=each.cwd, log="", run_id=each.run_id, python=sys.executable, image=None, moment=each.began,
            )  # fmt: skip
    return [*found.values()]


def index_of(job: Submitted, word: str) -> str | None:
    """Which of an array a word means: its index, "" for all; None of a job that is not one."""
    if job.array is None:
        return None
    return "" if word == job.name else word.partition("_")[2].partition(".")[0]


def one_of(job: Submitted, word: str, command: str) -> JobId:
    """The job as its scheduler names it. Raises UsageError for an array without an index."""
    index = index_of(job, word)
    if index == "":
        what = f"job {job.number} is an array of --array {job.array}"
        raise UsageError(what, f"name one by its index: ddplaunch {command} {job.number.partition('.')[0]}_INDEX")
    return JobId(job.number, job.cluster, index)


def asked(scheduler: Scheduler, cluster: str | None) -> Scheduler:
    """The scheduler, if it may answer. Raises SilentScheduler where it cannot, at once."""
    if shutil.which(scheduler.asks) is None:
        what = f"{scheduler.asks} is not on PATH: this machine has no commands of {scheduler.system}"
        raise SilentScheduler(what, "type it on a login node")
    if why := scheduler.down(cluster):
        raise SilentScheduler(why, "no job is affected; try again when it is back")
    return scheduler


def found(which: JobId, scheduler: Scheduler) -> JobState:
    """How its scheduler says that a job stands.

    Raises:
        SilentScheduler: it says nothing.
        Forgotten: it does not know the job any more.
    """
    seen = asked(scheduler, which.cluster).look(which, SOON)
    if seen is None:
        what = f"{scheduler.asks} does not answer: the state of job {which.typed} is not known"
        raise SilentScheduler(what, f"{scheduler.pings or scheduler.asks} says whether {scheduler.system} is there")
    return seen


def standing(job: Submitted, which: JobId, scheduler: Scheduler | None = None) -> JobState:
    """How it stands; how it ended is kept. ``scheduler`` is the one to ask, for those who ask more than once.

    Raises:
        LaunchError: the scheduler does not answer, or neither it nor we know the job any more.
    """
    scheduler = scheduler or scheduler_of(job)
    end = job.end_of(which.index)
    log, errors = job.files(which.index)
    kept = JobState(end.words, end.code, job=which, number=which.typed, log=log, errors=errors) if end else None
    if kept and not scheduler.revives:
        return kept
    try:
        seen = found(which, scheduler)
    except Forgotten:
        if kept is None:
            raise
        return kept
    keep_end(job, which, seen)
    if log is None or "%" not in log:  # else Slurm says it wrongly
        log, errors = seen.log or log, seen.errors or errors
    return replace(seen, log=log, errors=errors)


def end_elsewhere(shares: Sequence[RunRecord]) -> JobState | None:
    """How the scheduler says that the job of a run has ended which, by its records, goes on on other machines.

    None where the job goes on, or where no scheduler is known to have it. A job that waits to start again has ended,
    too. Raises SilentScheduler where its scheduler does not answer.
    """
    word = shares[0].job
    if not word or not any(map(_goes_on_elsewhere, shares)):
        return None
    job = submitted.find(word)
    if job and job.moment <= shares[0].began:
        which = JobId(job.number, job.cluster, index_of(job, word))
        try:
            seen = standing(job, which)
        except Forgotten:
            seen = JobState(forgotten(job, which.index), 1)
    else:  # a script of the user's own
        number, _, index = word.partition("_")
        slurm = scheduler("slurm")
        if not number.isdecimal() or shutil.which(slurm.asks) is None:
            return None
        try:
            seen = found(JobId(number, index=index or None), slurm)
        except Forgotten:  # it may be another cluster's
            return None
        if (seen.host or "").partition(".")[0] not in {each.host.partition(".")[0] for each in shares}:
            return None
    return seen if seen.code is not None or seen.waits else None


def without_end(shares: Sequence[RunRecord], seen: JobState | None) -> list[RunRecord]:
    """The records of a run whose job ``seen`` shows to be over: those that have no end are LOST."""
    over = seen is not None and (seen.code is not None or seen.waits)
    return [replace(each, fate=Fate.LOST) if over and _goes_on_elsewhere(each) else each for each in shares]


def _goes_on_elsewhere(share: RunRecord) -> bool:
    return share.fate is Fate.RUNNING and share.host != host_name()


def keep_end(job: Submitted, which: JobId, seen: JobState | None) -> None:
    """Keep how it ended, where it has."""
    if seen and seen.code is not None:
        submitted.over(job, which.index, seen.words, seen.code)


def forgotten(job: Submitted, index: str | None = None) -> str:
    """Keep that it has ended, in a way that is not known; return what to say about it, after "job 7"."""
    words = f"ended; {SCHEDULERS[job.scheduler]} no longer knows how"
    submitted.over(job, index, words, 1)
    return words


def running(job: Submitted, which: JobId) -> JobState:
    """How it stands, where it runs. Raises UsageError if it waits or has ended."""
    seen = standing(job, which)
    if seen.code is not None:
        raise UsageError(f"job {which.typed} {seen.words}", f"ddplaunch report {which.typed}")
    if not seen.runs:
        raise UsageError(f"job {which.typed} {seen.words}: no rank runs", f"ddplaunch attach {which.typed} waits")
    return seen


def run_of(job: Submitted, seen: JobState) -> str:
    """The name of its latest run, or how that begins, where the nodes keep the history elsewhere."""
    return kept_run(job, seen) or job.run_id or f"{seen.number}."


def kept_run(job: Submitted, seen: JobState) -> str | None:
    """The name of its latest run in the history that this machine has, as where nodes share a home."""
    return next((name for name in past.names() if _is_of(job.run_id or f"{seen.number}.", name)), None)


def kept_runs(job: Submitted, seen: JobState) -> list[RunRecord]:
    """All its runs there, the first one first; not those of others that merely have the same run id."""
    again = [each.moment for each in submitted.every() if job.run_id == each.run_id and each.moment > job.moment]
    until = min(again, default=inf) if job.run_id else inf
    begins, number = job.run_id or f"{seen.number}.", seen.number.partition(".")[0]
    found = [
        each
        for each in past.records()
        if (each.job == number if each.job else _is_of(begins, each.run) and job.moment <= each.began < until)
    ]
    return sorted(found, key=lambda each: each.began)


def _is_of(begins: str, run: str) -> bool:
    """Whether the name of a run begins so: 77.0 and 77.1 are runs of a job of Slurm, 77 and 77.2 of others."""
    return f"{run}.".startswith(begins)
