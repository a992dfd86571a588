"""Finds the run that a command names: by run id, part of it, or its launcher's pid; without a name, the only one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ddplaunch.base.errors import UsageError, host_name, sanitize_line
from ddplaunch.base.text import closest_match, join_names
from ddplaunch.core.control_socket.socket_dir import list_sockets
from ddplaunch.features.runs import history_store
from ddplaunch.features.runs.run_record import RunRecord, RunState


class RunningJob(NamedTuple):
    """A job of this user that runs on this machine."""

    path: str  # of its control socket
    run_id: str  # its first 40 bytes, from the name of the control socket
    pid: int  # the launcher's


class FoundRun(NamedTuple):
    """A run: its control socket while it runs, its record in the history; at least one of them."""

    run: str
    running: RunningJob | None
    record: RunRecord | None


def list_running() -> list[RunningJob]:
    """List the jobs of this user that run on this machine; their launchers may be suspended."""
    return [job_at(path) for path in list_sockets()]


def job_at(path: str) -> RunningJob:
    """Return the job whose control socket is, or was, at ``path``."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    return RunningJob(path, run_id, int(pid))


def find_running(word: str | None) -> RunningJob:
    """Find the running job that ``word`` names, see ``find_run``; None is the only one.

    Raises:
        UsageError: no job, or several jobs match.
    """
    runs = list_known()
    jobs = {name: job for name, job in runs.items() if job}
    if word is None:
        return jobs[_require_single(jobs)]
    _check_not_empty(word)
    same = _with_run_id(word, runs)
    name = same[0] if same and same[0] in jobs else None if same else _resolve_name(word, jobs)
    if name:
        return jobs[name]
    if same or word in runs:
        earlier = [each for each in same if each in jobs]
        hint = f"an earlier run is still running: {join_names(earlier)}" if earlier else f"ddplaunch report {word}"
        raise UsageError(f"{word} has ended", hint)
    raise _unknown_run_error(word, jobs)


def find_run(word: str) -> FoundRun:
    """Find the run that ``word`` names, running or ended.

    ``word`` is a run id (the newest run with it is found), a name from ``list_known``, a pid, or a part of a name.

    Raises:
        UsageError: no run, or several runs match.
    """
    _check_not_empty(word)
    runs = list_known()
    name = next(iter(_with_run_id(word, runs)), None) or _resolve_name(word, runs)
    if name is None:
        raise _unknown_run_error(word, runs)
    run = FoundRun(name, runs[name], history_store.read_run_record(name))
    if run.running is None and run.record is None:
        raise UsageError(f"the record of {name} cannot be read", f"ddplaunch clean {name}")
    return run


def read_job_record(job: RunningJob) -> RunRecord | None:
    """Read the record of a job, which may have ended since, from the history."""
    name = next(
        (name for name in history_store.list_runs() if name.startswith(job.run_id) and _matches(job, name)), None
    )
    return history_store.read_run_record(name) if name else None


def list_known() -> dict[str, RunningJob | None]:
    """Map the names of all runs of this user, the latest first, to their control sockets; None for ended ones."""
    runs: dict[str, RunningJob | None] = dict.fromkeys(history_store.list_runs())
    unrecorded: dict[str, RunningJob | None] = {}
    for job in sorted(list_running(), key=_socket_created_at, reverse=True):
        name = next((name for name in runs if name.startswith(job.run_id) and _matches(job, name)), None)
        if name:
            other, first = runs[name], history_store.read_run_record(name)
            if other is None:
                runs[name] = job
            elif first and first.pid == job.pid:  # of several nodes on this machine node 0 has the name
                runs[name], unrecorded[f"{name}.{other.pid}"] = job, other
            else:
                unrecorded[f"{name}.{job.pid}"] = job
        else:
            unrecorded[job.run_id if job.run_id not in {*runs, *unrecorded} else f"{job.run_id}.{job.pid}"] = job
    return {**unrecorded, **runs}


def _matches(job: RunningJob, name: str) -> bool:
    """Whether this is the record of a job that runs, or ran until a moment ago."""
    host = host_name()
    records = (each for each in history_store.read_node_records(name) if (each.pid, each.host) == (job.pid, host))
    return any(each.fate is RunState.RUNNING or (each.ended or 0) > _socket_created_at(job) for each in records)


def _socket_created_at(job: RunningJob) -> float:
    """Return when the control socket was made, in seconds since the epoch; 0 where it is gone."""
    try:
        return os.stat(job.path).st_mtime
    except OSError:
        return 0.0


def _with_run_id(word: str, runs: Mapping[str, RunningJob | None]) -> list[str]:
    """List the runs with this run id, the newest first."""
    candidates = [
        name for name in runs if name == word or (name.startswith(f"{word}.") and name[len(word) + 1 :].isdecimal())
    ]
    if candidates == [word]:
        return candidates
    began: dict[str, float] = {}
    for name in candidates:
        job, record = runs[name], history_store.read_run_record(name)
        if record and record.run_id == word:
            began[name] = record.began
        elif job and not record and job.run_id == word and not read_job_record(job):
            began[name] = _socket_created_at(job)  # not a further node of a recorded run, which has no name of its own
    return sorted(began, key=began.__getitem__, reverse=True)


def _require_single(jobs: Mapping[str, object]) -> str:
    if not jobs:
        raise UsageError("you have no running jobs on this machine", "ddplaunch ps --all shows those that have ended")
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs are running: name one", join_names(jobs))
    return next(iter(jobs))


def _resolve_name(word: str, runs: Mapping[str, RunningJob | None]) -> str | None:
    """Return the run with this name or pid, else the only one whose name begins with it, else contains it.

    A number must match a whole part between dashes, dots and underscores: it may be the id of a batch job that is no
    longer known, and no other run may be stopped in its place. Runs with the same run id count as one: the newest.
    """
    if word in runs:
        return word
    number = word.isdecimal()
    for matches in (
        [name for name, job in runs.items() if job and word == str(job.pid)],
        [name for name in runs if name.startswith(word) and not number],
        [name for name in runs if word in (re.split(r"[-._]", name) if number else name) and word[0] != "-"],
    ):
        if len(matches) > 1 and not set(matches) - set(same := _with_run_id(_get_run_id(matches[0], runs), runs)):
            return same[0]
        if len(matches) > 1:
            raise UsageError(
                f'"{sanitize_line(word, 60)}" matches {len(matches)} runs: {join_names(matches)}',
                "type more of the name",
            )
        if matches:
            return matches[0]
    return None


def _check_not_empty(word: str) -> None:
    if not word:
        raise UsageError("the name of the run is empty", "a variable in the command may have no value")


def _get_run_id(name: str, runs: Mapping[str, RunningJob | None]) -> str:
    job, record = runs[name], history_store.read_run_record(name)
    return record.run_id if record else job.run_id if job else name


def _unknown_run_error(word: str, runs: Iterable[str]) -> UsageError:
    near = closest_match(word, runs)
    hint = f"did you mean {near}?" if near else "ddplaunch ps --all shows them"
    return UsageError(f"no run is called {sanitize_line(word, 60)}", hint)
