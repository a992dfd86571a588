"""Finds the run that a command means: on this machine, and where the locators of features know more."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.run_locator import (
    HostConnector,
    RemoteJob,
    RunIndex,
    RunLocator,
    RunningBatchJob,
    RunningJob,
    job_at,
)
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.core.feature import load_features


def list_running() -> list[RunningJob]:
    """List the jobs of this user that run on this machine; their launchers may be suspended."""
    jobs = [job_at(path) for path in list_sockets()]
    pids = {job.pid for job in jobs}
    for locator in _locators():
        jobs += [job for job in locator.list_running() if job.pid not in pids]
    return jobs


def index_runs() -> RunIndex:
    """Return the index of all runs that are known on this machine."""
    running = list_running()
    indices = (locator.index_runs(running) for locator in _locators())
    return next(filter(None, indices), None) or RunIndex.from_running(running)


def find_running(word: str | None) -> RunningJob:
    """Find the job on this machine that ``word`` names, see ``RunIndex.find_running``."""
    return index_runs().find_running(word)


def find_batch_job(word: str | None, command: str) -> RunningBatchJob | None:
    """Find the running job of a batch scheduler that ``word`` names, see ``RunLocator.find_batch_job``."""
    if word is None:
        return None
    return next(filter(None, (locator.find_batch_job(word, command) for locator in _locators())), None)


def list_remote_jobs() -> list[RemoteJob]:
    """List the jobs without a launcher on this machine nor, when they have ended, a run record here; latest first."""
    jobs = [job for locator in _locators() for job in locator.list_remote_jobs()]
    known = index_runs().jobs if jobs else {}
    here = {job.run_id for job in known.values() if job}
    return [job for job in jobs if job.run_id[:40] not in here and (job.is_running or job.run_id not in known)]


def find_remote_job(word: str | None) -> RemoteJob | None:
    """Find the job on other hosts with this name, beginning of a name, or PID; ``word`` None: the only one.

    None if none or several match, or a run of this machine.
    """
    jobs = list_remote_jobs()
    if word is None:
        jobs = [] if list_running() else [job for job in jobs if job.is_running]
        return jobs[0] if len(jobs) == 1 else None
    exact = [job for job in jobs if job.run_id == word or (job.is_running and str(job.pid) == word)]
    if exact or not word or word.isdecimal():
        return next(iter(exact), None)
    names = {*(job.run_id for job in jobs), *index_runs().jobs}
    matches = [job for job in jobs if job.run_id.startswith(word)]
    return matches[0] if len([name for name in names if name.startswith(word)]) == 1 and matches else None


def find_host_connector(needed_by: str) -> HostConnector:
    """Return how to run commands on other hosts.
    Raises UsageError if no feature connects to hosts; ``needed_by`` is what needs one, for the message.
    """
    connectors = (locator.host_connector() for locator in _locators())
    if connector := next(filter(None, connectors), None):
        return connector
    raise UsageError(f"{needed_by} needs the feature ssh, which this ddplaunch does not have", "reinstall ddplaunch")


def _locators() -> Iterator[RunLocator]:
    return (module.LOCATOR for module in load_features().modules("locators"))
