"""The jobs on other hosts that this user has started from here, and the interface of the features that start them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.cli.host_connector import HostConnector
from ddplaunch.cli.lookup import running_jobs
from ddplaunch.cli.lookup.run_index import ends_within_number, index_runs
from ddplaunch.core.feature_registry import load_features
from ddplaunch.system.processes.proc_utils import start_ticks


class RemoteJob(Struct, frozen=True):
    """The record of a job that this user started on other machines; features subclass it to add how to reach them."""

    run_id: str
    hosts: tuple[str, ...]  # the first is node 0
    python: str  # the interpreter that runs ddplaunch on the hosts
    target: str
    cwd: str  # of the command that started it
    pid: int  # of that command
    ticks: int | None  # when that process started, see `start_ticks`
    host: str  # the machine on which that command runs
    began: float  # in seconds since the epoch
    ended: float | None = None
    code: int | None = None  # its exit code
    argv: tuple[str, ...] = ()  # of the command that started it, without secrets

    @property
    def is_running(self) -> bool:
        """Whether the command that started the job still runs, as far as this machine knows."""
        is_remote = self.host != host_name()
        return self.ended is None and (is_remote or start_ticks(self.pid) == self.ticks)

    @property
    def state(self) -> str:
        """The state of the job in one word: running, lost, failed or done."""
        if self.ended is None:
            return "running" if self.is_running else "lost"
        return "failed" if self.code else "done"

    @property
    def is_submitted(self) -> bool:
        """Whether this job was submitted to a batch scheduler on the other host; False by default."""
        return False

    @property
    def description(self) -> str:
        """The state of the job for the output of ``ps``, with a nonzero exit code: "failed (1)"."""
        return f"{self.state} ({self.code})" if self.code else self.state

    def matches_exactly(self, word: str) -> bool:
        """Whether a word is the full name or number of the job, not only the beginning of its name."""
        return word == self.run_id or (self.is_running and word == str(self.pid))

    def name_on_host(self, word: str) -> str:
        """Return the word that names this job on its host; ``word`` names it here."""
        return self.run_id

    def start_on_first_host(self, words: Sequence[str], *, stdin: bool = True) -> Callable[[], int]:
        """Start ``ddplaunch WORDS`` on the job's first host; return a function that waits and returns the exit code.

        ``stdin``: the command reads this process's stdin, which only one command at a time can.
        """
        raise NotImplementedError

    def format_command(self, words: Sequence[str]) -> str:
        """Return the shell command with which a user can run ``ddplaunch WORDS`` on the job's first host."""
        return f"ssh {self.hosts[0]} {shlex.join(['ddplaunch', *words])}"

    def remove_record(self) -> None:
        """Delete the record of the job on this machine."""
        raise NotImplementedError


class JobOnOtherHosts(Exception):
    """Raised by a command without RUN if its job is on other hosts: the command must run on the first of them."""

    def __init__(self, job: RemoteJob) -> None:
        super().__init__(job)
        self.job = job


class RunLocator:
    """Base class with which a feature helps to find the run that a command names; all methods are optional."""

    def list_remote_jobs(self) -> list[RemoteJob]:
        """List the jobs that this user has started on other machines from this one."""
        return []

    def update_remote_jobs(self, jobs: Sequence[RemoteJob]) -> list[RemoteJob]:
        """Return the jobs, those of this feature with their current states, queried from their hosts if necessary."""
        return [*jobs]

    def remove_leftovers(self, started_before: float, *, dry_run: bool) -> Iterator[str]:
        """Remove what ended jobs have left on disks beside their records; yield a line for each thing, and for what is
        kept. ``dry_run``: remove nothing.
        """
        yield from ()

    def host_connector(self) -> HostConnector | None:
        """Return the object that builds commands for other hosts; None if this feature connects to no hosts."""
        return None


def list_remote_jobs() -> list[RemoteJob]:
    """List the jobs without a launcher on this machine, ended ones only without a run record here; latest first."""
    jobs = [job for locator in _locators() for job in locator.list_remote_jobs()]
    known = index_runs().jobs if jobs else {}
    here = {job.run_id for job in known.values() if job}
    return [job for job in jobs if job.run_id[:40] not in here and (job.is_running or job.run_id not in known)]


def update_remote_jobs(jobs: list[RemoteJob]) -> list[RemoteJob]:
    """Return the jobs with their states, see ``RunLocator.update_remote_jobs``."""
    for locator in _locators() if jobs else ():
        jobs = locator.update_remote_jobs(jobs)
    return jobs


def remove_leftovers(started_before: float, *, dry_run: bool) -> Iterator[str]:
    """Remove what ended jobs have left, see ``RunLocator.remove_leftovers``."""
    for locator in _locators():
        yield from locator.remove_leftovers(started_before, dry_run=dry_run)


def find_remote_job(word: str | None) -> RemoteJob | None:
    """Find the job on other hosts with this name, beginning of a name, or PID; ``word`` None: the only one.

    Returns None if no job or several match, or if a run of this machine matches.
    """
    jobs = list_remote_jobs()
    if word is None:
        running = [job for job in jobs if job.is_running]
        return running[0] if len(running) == 1 and not running_jobs.list_running() else None
    exact = [job for job in jobs if job.matches_exactly(word)]
    if exact or not word or word.isdecimal():
        return next(iter(exact), None)
    known = [*(job.run_id for job in reversed(jobs)), *index_runs().jobs]
    names = {name for name in known if name.startswith(word) and not ends_within_number(name, word)}
    matches = {job.run_id: job for job in reversed(jobs) if job.run_id in names}
    if len(matches) != 1 or names - matches.keys():
        return None
    return next(iter(matches.values()))


def _locators() -> Iterator[RunLocator]:
    return (module.LOCATOR for module in load_features().modules("locators"))


def find_host_connector(needed_by: str) -> HostConnector:
    """Return the object that builds commands for other hosts.
    Raises UsageError if no feature connects to hosts; its message names what needs that: ``needed_by``.
    """
    connectors = (locator.host_connector() for locator in _locators())
    if connector := next(filter(None, connectors), None):
        return connector
    raise UsageError(
        f"{needed_by} needs connections to other hosts, which this ddplaunch does not make", "reinstall ddplaunch"
    )
