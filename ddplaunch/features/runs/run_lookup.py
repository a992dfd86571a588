"""Finds runs by their names in the history, and the jobs of this machine among them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.base.errors import LaunchError, UsageError, host_name
from ddplaunch.base.local_sockets import is_private_dir
from ddplaunch.cli import locate
from ddplaunch.cli.locate import RunIndex, RunLocator, RunningBatchJob, RunningJob, job_at
from ddplaunch.features.runs import history_store, job_resolver
from ddplaunch.features.runs.run_record import RunRecord, RunState


class FoundRun(NamedTuple):
    """A run: its control socket while it runs, its record in the history; at least one of them."""

    run: str
    running: RunningJob | None
    record: RunRecord | None


class RecordedRuns(RunIndex):
    """All runs of this user: those of the history, and running ones that have no record."""

    def __init__(self, running: Sequence[RunningJob]) -> None:
        runs: dict[str, RunningJob | None] = dict.fromkeys(history_store.list_runs())
        unrecorded: dict[str, RunningJob | None] = {}
        for job in sorted(running, key=socket_created_at, reverse=True):
            if name := _find_record(job, runs):
                other, first = runs[name], history_store.read_run_record(name)
                if other is None:
                    runs[name] = job
                elif first and first.pid == job.pid:  # of several nodes on this machine node 0 has the name
                    runs[name], unrecorded[f"{name}.{other.pid}"] = job, other
                else:
                    unrecorded[f"{name}.{job.pid}"] = job
            else:
                unrecorded[job.run_id if job.run_id not in {*runs, *unrecorded} else f"{job.run_id}.{job.pid}"] = job
        super().__init__({**unrecorded, **runs})

    def with_run_id(self, run_id: str) -> list[str]:
        candidates = [
            name
            for name in self.jobs
            if name == run_id or (name.startswith(f"{run_id}.") and name[len(run_id) + 1 :].isdecimal())
        ]
        if candidates == [run_id]:
            return candidates
        began: dict[str, float] = {}
        for name in candidates:
            job, record = self.jobs[name], history_store.read_run_record(name)
            if record and record.run_id == run_id:
                began[name] = record.began
            elif job and not record and job.run_id == run_id and not read_job_record(job):
                began[name] = socket_created_at(job)  # not a further node of a recorded run, which has no own name
        return sorted(began, key=began.__getitem__, reverse=True)

    def other_hosts(self, name: str) -> list[str]:
        records, ended = history_store.read_node_records(name), None
        with suppress(LaunchError):
            ended = job_resolver.end_elsewhere(records) if records else None
        return history_store.hosts_elsewhere(job_resolver.mark_lost(records, ended))

    def find_run_of_job(self, word: str) -> str | None:
        of_job = [each for each in history_store.read_all_records() if each.job == word]
        return max(of_job, key=lambda each: each.began).run if of_job else None

    def find_launcher(self, name: str) -> int | None:
        here = (each for each in history_store.read_node_records(name) if each.host == host_name())
        return next((each.pid for each in here if each.fate is RunState.RUNNING), None)

    def run_id(self, name: str) -> str:
        record = history_store.read_run_record(name)
        return record.run_id if record else super().run_id(name)


class RecordedRunLocator(RunLocator):
    """Finds runs by the history, and batch jobs by the records of submitted jobs and by Slurm."""

    def list_running(self) -> list[RunningJob]:
        paths = ((each.control_socket or "", each.pid) for each in history_store.read_launchers_here())
        # A path as job_at reads it, in a folder like those where sockets are looked for.
        found = [path for path, pid in paths if path.endswith(f".{pid}") and is_private_dir(os.path.dirname(path))]
        return [job_at(path) for path in found if os.path.exists(path)]

    def index_runs(self, running: Sequence[RunningJob]) -> RunIndex:
        return RecordedRuns(running)

    def find_batch_job(self, word: str, command: str) -> RunningBatchJob | None:
        job = job_resolver.resolve_job(word)
        if job is None:
            return None
        state = job_resolver.require_running(job, job_resolver.resolve_job_id(job, word, command))
        return RunningBatchJob(job, state, job_resolver.run_name(job, state))


def find_run(word: str) -> FoundRun:
    """Find the run that ``word`` names, running or ended, see ``RunIndex.find_name``.

    Raises UsageError if no run, or several runs match.
    """
    index = locate.index_runs()
    name = index.find_name(word)
    run = FoundRun(name, index.jobs[name], history_store.read_run_record(name))
    if run.running is None and run.record is None:
        raise UsageError(f"the record of {name} cannot be read", f"ddplaunch clean {name}")
    return run


def read_job_record(job: RunningJob) -> RunRecord | None:
    """Read the record of a job, which may have ended since, from the history."""
    name = _find_record(job, history_store.list_runs())
    return history_store.read_run_record(name) if name else None


def _find_record(job: RunningJob, names: Iterable[str]) -> str | None:
    return next((name for name in names if name.startswith(job.run_id) and _matches(job, name)), None)


def _matches(job: RunningJob, name: str) -> bool:
    """Whether this is the record of a job that runs, or ran until a moment ago."""
    host = host_name()
    records = (each for each in history_store.read_node_records(name) if (each.pid, each.host) == (job.pid, host))
    return any(each.fate is RunState.RUNNING or (each.ended or 0) > socket_created_at(job) for each in records)


def socket_created_at(job: RunningJob) -> float:
    """Return when the control socket was made, in seconds since the epoch; 0 where it is gone."""
    try:
        return os.stat(job.path).st_mtime
    except OSError:
        return 0.0


LOCATOR = RecordedRunLocator()
