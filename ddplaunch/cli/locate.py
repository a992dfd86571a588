"""Finds the run that a word of a command line means. The first of these that matches is taken:

1. a job that was started here on other hosts, unless a run of this machine matches too: the command runs on the first
   of them (``find_remote_job``, called by ``job_argument``);
2. a job of a batch scheduler: the command runs on its node 0 (``find_batch_job``), or is about the job, also if that
   waits or has ended (``features/runs/job_resolver.py``);
3. a run of this machine (``RunIndex``): the newest with this run id; the one with this name, or whose launcher has this
   PID; the only one whose name begins with the word, else contains it; the newest of the batch job with this id.

Without a word the only running job is meant, or, where a run may have ended, the newest of the current folder
(``features/runs/default_run.py``). Features find runs without a control socket here: ``RunLocator``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.base.errors import UsageError, host_name, sanitize_line
from ddplaunch.base.text import closest_match, join_names
from ddplaunch.cli.host_connector import HostConnector
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.core.feature_registry import load_features
from ddplaunch.system.processes.proc_utils import start_ticks
from ddplaunch.system.schedulers.job_step import run_on_nodes
from ddplaunch.system.schedulers.scheduler import BatchJobState
from ddplaunch.system.schedulers.submitted_job import SubmittedJob


class RunningJob(NamedTuple):
    """A job of this user that runs on this machine."""

    path: str  # of its control socket
    run_id: str  # its first 40 bytes, from the name of the control socket
    pid: int  # the launcher's


def job_at(path: str) -> RunningJob:
    """Return the job whose control socket is, or was, at ``path``."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    return RunningJob(path, run_id, int(pid))


class RunningBatchJob(NamedTuple):
    """A running job of a batch scheduler, whose launchers are on other machines."""

    job: SubmittedJob
    state: BatchJobState
    run: str  # the name of its latest run, or the beginning of that name

    def run_command(self, command: str, options: Sequence[str]) -> int:
        """Run a command for this run on node 0, pass on its output, and return its exit code."""
        return run_on_nodes(self.job, self.state, [command, self.run, *options])


class RemoteJob(Struct, frozen=True):
    """A job on other machines, as recorded on the one that it was started from; a feature that starts some adds how."""

    run_id: str
    hosts: tuple[str, ...]  # the first is node 0
    python: str  # that runs ddplaunch on the hosts
    target: str
    cwd: str  # of the command that started it
    pid: int  # of that command
    ticks: int | None  # when that process started, see `start_ticks`
    host: str  # of that process
    began: float  # in seconds since the epoch
    ended: float | None = None
    code: int | None = None  # its exit code

    @property
    def is_running(self) -> bool:
        """Whether the command that started it still runs, as far as this machine knows."""
        is_remote = self.host != host_name()
        return self.ended is None and (is_remote or start_ticks(self.pid) == self.ticks)

    @property
    def state(self) -> str:
        """Its state in a word: running, lost, failed or done."""
        if self.ended is None:
            return "running" if self.is_running else "lost"
        return "failed" if self.code else "done"

    def start_command(self, words: Sequence[str], *, stdin: bool = True) -> Callable[[], int]:
        """Start ``ddplaunch WORDS`` on its first host; return a function that waits for its end and returns its code.

        ``stdin``: the command reads this process's stdin, which only one command at a time can.
        """
        raise NotImplementedError

    def format_command(self, words: Sequence[str]) -> str:
        """Return the shell command with which a user can run ``ddplaunch WORDS`` on its first host."""
        raise NotImplementedError

    def remove_record(self) -> None:
        """Forget the job."""
        raise NotImplementedError


class RunIndex:
    """The runs of this user by name; here those that run on this machine, by their control sockets."""

    def __init__(self, jobs: Mapping[str, RunningJob | None]) -> None:
        """``jobs``: by name, the latest first; None for runs that have ended or run elsewhere."""
        self.jobs = jobs

    @classmethod
    def from_running(cls, running: Iterable[RunningJob]) -> RunIndex:
        """Name each job by its run id, and also by its PID if another has the same run id."""
        jobs: dict[str, RunningJob | None] = {}
        for job in running:
            jobs[job.run_id if job.run_id not in jobs else f"{job.run_id}.{job.pid}"] = job
        return cls(jobs)

    def with_run_id(self, run_id: str) -> list[str]:
        """List the runs with this run id, the newest first."""
        return [name for name, job in self.jobs.items() if job and job.run_id == run_id]

    def other_hosts(self, name: str) -> list[str]:
        """List the other machines on which a run is known to run."""
        return []

    def find_run_of_job(self, word: str) -> str | None:
        """Return the newest run of the batch job with this id; None if there is none."""
        return None

    def find_ended(self, word: str) -> str | None:
        """Return the run that ``word`` names as ``find_name`` does, though it does not run here; None if none does."""
        try:
            return self._resolve(word, self.jobs) or self.find_run_of_job(word)
        except UsageError:  # several
            return None

    def find_launcher(self, name: str) -> int | None:
        """Return the PID of the launcher of a run, if it is alive on this machine though it has no control socket."""
        return None

    def run_id(self, name: str) -> str:
        """Return the run id of a run."""
        job = self.jobs[name]
        return job.run_id if job else name

    def find_running(self, word: str | None) -> RunningJob:
        """Find the running job that ``word`` names, see ``find_name``; None is the only one.
        Raises UsageError if no job, or several jobs match.
        """
        jobs = {name: job for name, job in self.jobs.items() if job}
        if word is None:
            return jobs[_require_single(jobs)]
        _check_not_empty(word)
        same = self.with_run_id(word)
        name = same[0] if same and same[0] in jobs else None if same else self._resolve(word, jobs)
        if name:
            return jobs[name]
        if found := next(iter(same), None) or self.find_ended(word):
            if hosts := self.other_hosts(found):
                raise UsageError(*describe_elsewhere(found, hosts))
            if pid := self.find_launcher(found):
                what = describe_unreachable(found, pid)
                raise UsageError(what, f"kill {pid} stops it; ddplaunch report {word} shows its record")
            earlier = [each for each in same if each in jobs]
            hint = f"an earlier run is still running: {join_names(earlier)}" if earlier else f"ddplaunch report {word}"
            raise UsageError(f"{word} has ended", hint)
        raise _unknown_run_error(word, jobs)

    def find_name(self, word: str) -> str:
        """Find the name of the run that ``word`` names, running or ended.

        ``word`` is a run id (the newest run with it is found), a name, a PID, a part of a name, or the id of a batch
        job.
        Raises UsageError if no run, or several runs match.
        """
        _check_not_empty(word)
        name = next(iter(self.with_run_id(word)), None) or self._resolve(word, self.jobs)
        name = name or self.find_run_of_job(word)
        if name is None:
            raise _unknown_run_error(word, self.jobs)
        return name

    def _resolve(self, word: str, jobs: Mapping[str, RunningJob | None]) -> str | None:
        """Return the run with this name or PID, else the only one whose name begins with it, else contains it.

        A number must match a whole part between dashes, dots and underscores: it may be the id of a batch job that is
        no longer known, and no other run may be stopped in its place. Runs with the same run id count as one: the
        newest.
        """
        if word in jobs:
            return word
        number = word.isdecimal()
        for matches in (
            [name for name, job in jobs.items() if job and word == str(job.pid)],
            [name for name in jobs if name.startswith(word) and not number],
            [name for name in jobs if word in (re.split(r"[-._]", name) if number else name) and word[0] != "-"],
        ):
            if len(matches) > 1:
                same = [name for name in self.with_run_id(self.run_id(matches[0])) if name in jobs]
                if not set(matches) - set(same):
                    return same[0]
                raise UsageError(
                    f'"{sanitize_line(word, 60)}" matches {len(matches)} runs: {join_names(matches)}',
                    "type more of the name",
                )
            if matches:
                return matches[0]
        return None


class RunLocator:
    """A feature's part in finding the run that a command means. A subclass overrides only what it has."""

    def list_running(self) -> list[RunningJob]:
        """List jobs of this machine by their records: the socket's folder depends on the launcher's variables."""
        return []

    def index_runs(self, running: Sequence[RunningJob]) -> RunIndex | None:
        """Return an index that knows more runs than ``running``, the jobs of this machine; None if it has none."""
        return None

    def find_batch_job(self, word: str, command: str) -> RunningBatchJob | None:
        """Find the running job of a batch scheduler that ``word`` names; None if it names none.

        ``command`` is the command that is meant for it, for messages.
        Raises LaunchError if that job does not run, or its scheduler does not answer.
        """
        return None

    def list_remote_jobs(self) -> list[RemoteJob]:
        """List the jobs that this user has started from this machine on others."""
        return []

    def remove_leftovers(self, started_before: float, *, dry_run: bool) -> Iterator[str]:
        """Remove what ended jobs have left on disks beside their records; yield a line for each thing, and for what is
        kept. ``dry_run``: remove nothing.
        """
        yield from ()

    def host_connector(self) -> HostConnector | None:
        """Return how to run commands on other hosts; None if this feature does not connect to any."""
        return None


def describe_elsewhere(name: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return message and hint of a command that reaches the launchers of its own machine only."""
    return f"{name} runs on {join_names(hosts)}, not on this machine", f"type the command on {hosts[0]}"


def describe_unreachable(name: str, pid: int) -> str:
    """Return the message on a run whose launcher is alive without a control socket: a cleaner of /tmp removes some."""
    return f"{name} runs (PID {pid}), but its launcher has no control socket"


def _require_single(jobs: Mapping[str, object]) -> str:
    if not jobs:
        raise UsageError("you have no running jobs on this machine", "ddplaunch ps --all shows those that have ended")
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs are running: name one", join_names(jobs))
    return next(iter(jobs))


def _check_not_empty(word: str) -> None:
    if not word:
        raise UsageError("the name of the run is empty", "a variable in the command may have no value")


def _unknown_run_error(word: str, runs: Iterable[str]) -> UsageError:
    near = closest_match(word, runs)
    hint = f"did you mean {near}?" if near else "ddplaunch ps --all shows them"
    return UsageError(f"no run is called {sanitize_line(word, 60)}", hint)


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


def remove_leftovers(started_before: float, *, dry_run: bool) -> Iterator[str]:
    """Remove what ended jobs have left, see ``RunLocator.remove_leftovers``."""
    for locator in _locators():
        yield from locator.remove_leftovers(started_before, dry_run=dry_run)


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


def _locators() -> Iterator[RunLocator]:
    return (module.LOCATOR for module in load_features().modules("locators"))


def find_host_connector(needed_by: str) -> HostConnector:
    """Return how to run commands on other hosts.
    Raises UsageError if no feature connects to hosts; ``needed_by`` is what needs one, for the message.
    """
    connectors = (locator.host_connector() for locator in _locators())
    if connector := next(filter(None, connectors), None):
        return connector
    raise UsageError(
        f"{needed_by} needs connections to other hosts, which this ddplaunch does not make", "reinstall ddplaunch"
    )
