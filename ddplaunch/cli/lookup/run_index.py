"""The runs of this user by name, running on this machine or recorded; finds the run that a word names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.base.errors import LaunchError, UsageError, host_name, sanitize_line, truncate_line
from ddplaunch.base.text import closest_match, join_names
from ddplaunch.cli import client
from ddplaunch.cli.lookup import batch_jobs, running_jobs
from ddplaunch.cli.lookup.running_jobs import RunningJob, find_record
from ddplaunch.cli.text_table import short_target
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord, RunState

TARGET_TIMEOUT_S = 2.0  # for a launcher to say what it runs: it may be suspended


class FoundRun(NamedTuple):
    """A run: its control socket while it runs, its record in the history; at least one of the two."""

    run: str
    running: RunningJob | None
    record: RunRecord | None


class RunIndex:
    """All runs of this user by name, the latest first: those of the history, and running ones that have no record.

    A running one without a record has its run id as its name, and also its PID if another has the same run id.
    """

    def __init__(self, running: Iterable[RunningJob]) -> None:
        runs: dict[str, RunningJob | None] = dict.fromkeys(history_store.list_runs())
        unrecorded: dict[str, RunningJob | None] = {}
        for job in sorted(running, key=lambda job: job.created_at, reverse=True):
            if record := find_record(job, runs):
                name, other = record.run, runs[record.run]
                if other is None:
                    runs[name] = job
                elif record.pid == job.pid:  # of several nodes on this machine node 0 has the name
                    runs[name], unrecorded[f"{name}.{other.pid}"] = job, other
                else:
                    unrecorded[f"{name}.{job.pid}"] = job
            else:
                unrecorded[job.run_id if job.run_id not in {*runs, *unrecorded} else f"{job.run_id}.{job.pid}"] = job
        self.jobs = {**unrecorded, **runs}  # None: it has ended, or runs elsewhere

    @property
    def running(self) -> dict[str, RunningJob]:
        """The runs that run on this machine, by name."""
        return {name: job for name, job in self.jobs.items() if job}

    def find_running(self, word: str | None) -> RunningJob:
        """Find the running job that ``word`` names, see ``find_name``; None names the only running job.
        Raises UsageError if no job, or several jobs match.
        """
        running = self.running
        if word is None:
            return running[_require_single(running)]
        same = self._with_run_id(word)
        name = same[0] if same else self._match(word, running)
        if name in running:
            return running[name]
        if name is None:
            with suppress(UsageError):  # several
                name = self._match(word, self.jobs) or _find_run_of_job(word)
        if name is None:
            raise _unknown_run_error(word, running)
        raise _not_running_error(name, word, [each for each in same if each in running])

    def find_name(self, word: str) -> str:
        """Find the name of the run that ``word`` names, running or ended.

        ``word`` is a run id (the newest run with it is found), a name, a PID, a part of a name, or the id of a batch
        job.
        Raises UsageError if no run, or several runs match.
        """
        name = next(iter(self._with_run_id(word)), None) or self._match(word, self.jobs) or _find_run_of_job(word)
        if name is None:
            raise _unknown_run_error(word, self.jobs)
        return name

    def _with_run_id(self, run_id: str) -> list[str]:
        """List the runs with this run id, the newest first. Raises UsageError if it is empty."""
        if not run_id:
            raise UsageError("the name of the run is empty", "a variable in the command may have no value")
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
            elif job and not record and job.run_id == run_id and not find_record(job):
                began[name] = job.created_at  # not a further node of a recorded run, which has no own name
        return sorted(began, key=began.__getitem__, reverse=True)

    def _match(self, word: str, names: Iterable[str]) -> str | None:
        """Return the run with this name or PID, else the only one whose name begins with the word, else contains it.

        A number must match a whole part between dashes, dots and underscores, but not the last of train-17: it may be
        the id of a batch job that is no longer known, and no other run may be stopped in its place. So train-1 does
        not name train-17. Runs with the same run id count as one: the newest.
        """
        if word in names:
            return word
        number = word.isdecimal()
        for matches in (
            [name for name in names if (job := self.jobs[name]) and word == str(job.pid)],
            [name for name in names if name.startswith(word) and not number and not ends_within_number(name, word)],
            [name for name in names if word[0] != "-" and _contains(name, word)],
        ):
            if len(matches) > 1:
                same = [name for name in self._with_run_id(self._run_id(matches[0])) if name in names]
                if not set(matches) - set(same):
                    return same[0]
                raise UsageError(
                    f'"{sanitize_line(word, 60)}" matches {len(matches)} runs: {join_names(matches)}',
                    "give the full name",
                )
            if matches:
                return matches[0]
        return None

    def _run_id(self, name: str) -> str:
        known = history_store.read_run_record(name) or self.jobs[name]
        return known.run_id if known else name


def index_runs() -> RunIndex:
    """Return the index of all runs that are known on this machine."""
    return RunIndex(running_jobs.list_running())


def find_running(word: str | None) -> RunningJob:
    """Find the job on this machine that ``word`` names, see ``RunIndex.find_running``."""
    return index_runs().find_running(word)


def find_run(word: str) -> FoundRun:
    """Find the run that ``word`` names, running or ended, see ``RunIndex.find_name``.

    Raises UsageError if no run, or several runs match.
    """
    index = index_runs()
    name = index.find_name(word)
    run = FoundRun(name, index.jobs[name], history_store.read_run_record(name))
    if run.running is None and run.record is None:
        raise UsageError(f"the record of {name} cannot be read", f"ddplaunch clean {name}")
    return run


def describe_elsewhere(name: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the message and hint for a run on other hosts, which the command cannot reach from this machine."""
    return f"{name} runs on {join_names(hosts)}, not on this machine", f"type the command on {hosts[0]}"


def describe_unreachable(name: str, pid: int) -> str:
    """Return the message for a run whose launcher is alive but has lost its control socket, as when /tmp is cleaned."""
    return f"{name} runs (PID {pid}), but its launcher has no control socket"


def _contains(name: str, word: str) -> bool:
    """Whether a run's name contains a word; a number must be a whole part of the name, and not the run counter."""
    if word.isdecimal():
        is_counted = not re.match(r"\d{8}-\d{6}-", name)  # not a time with random digits
        return word in re.split(r"[-._]", re.sub(r"-\d+$", "", name) if is_counted else name)
    return word in name and not ends_within_number(name, word)


def ends_within_number(name: str, word: str) -> bool:
    """Whether ``word`` ends within the number of ``name`` and so names another run: train-1 is not train-17."""
    rest = name.partition(word)[2]
    return word[-1].isdecimal() and rest.isdecimal()


def _find_run_of_job(word: str) -> str | None:
    """Return the newest run of the batch job with this id; None if there is none."""
    if not word[:1].isdecimal():
        return None  # no scheduler has such an id, and reading all records takes seconds
    of_job = [each for each in history_store.read_all_heads() if each.job == word]
    return max(of_job, key=lambda each: each.began).run if of_job else None


def _require_single(jobs: Mapping[str, RunningJob]) -> str:
    if not jobs:
        hint = "ddplaunch ps --all shows those that have ended"
        raise UsageError("you have no runs in progress on this machine", hint)
    if len(jobs) > 1:
        raise UsageError(
            f"{len(jobs)} runs are in progress: pick one",
            join_names([_name_with_target(*each) for each in jobs.items()]),
        )
    return next(iter(jobs))


def _name_with_target(name: str, job: RunningJob) -> str:
    """Return the name of a run with its target, if its launcher replies: "quick-1 (train.py --lr 3)"."""
    try:
        status = client.send_request(job.path, StatusQuery(), TARGET_TIMEOUT_S)
    except LaunchError:
        return name
    return f"{name} ({truncate_line(short_target(sanitize_line(status.target, 200)), 40)})"


def _not_running_error(name: str, word: str, earlier: Sequence[str]) -> UsageError:
    """Return the error for a run that does not run on this machine, or cannot be reached."""
    records, ended = history_store.read_node_records(name), None
    with suppress(LaunchError):
        ended = batch_jobs.find_final_state(records)
    if hosts := history_store.hosts_elsewhere(batch_jobs.mark_lost(records, ended)):
        return UsageError(*describe_elsewhere(name, hosts))
    here = (each.pid for each in records if each.host == host_name() and each.fate is RunState.RUNNING)
    if pid := next(here, None):
        what = describe_unreachable(name, pid)
        return UsageError(what, f"kill {pid} stops it; ddplaunch report {word} shows its record")
    hint = f"an earlier run is still running: {join_names(earlier)}" if earlier else f"ddplaunch report {word}"
    return UsageError(f"{word} has ended", hint)


def _unknown_run_error(word: str, runs: Iterable[str]) -> UsageError:
    near = closest_match(word, runs)
    hint = f"did you mean {near}?" if near else "ddplaunch ps --all shows them"
    return UsageError(f'no run named "{sanitize_line(word, 60)}"', hint)
