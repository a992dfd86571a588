"""Which run is meant: by its name, a part of that, its launcher's pid, or no word where only one can be meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ddplaunch.errors import UsageError, host_name, sanitize_line
from ddplaunch.job import past
from ddplaunch.job.folder import list_sockets
from ddplaunch.job.record import RunRecord, RunState
from ddplaunch.words import closest_match, join_names


class RunningJob(NamedTuple):
    """A job of this user that runs on this machine."""

    path: str  # of its door
    run_id: str  # as its door has it: the first 40 bytes
    pid: int  # the launcher's


class FoundRun(NamedTuple):
    """A run: its door while it runs, what the history has of it; at least one of them."""

    run: str
    running: RunningJob | None
    record: RunRecord | None


def list_running() -> list[RunningJob]:
    """The jobs of this user that run on this machine; their launchers may have been suspended."""
    return [job_at(path) for path in list_sockets()]


def job_at(path: str) -> RunningJob:
    """The job whose door is, or was, at ``path``."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    return RunningJob(path, run_id, int(pid))


def find_running(word: str | None) -> RunningJob:
    """The running job that ``word`` means, as in ``find_run``; None is the only one.

    Raises:
        UsageError: there is none, or several may be meant.
    """
    runs = list_known()
    jobs = {name: job for name, job in runs.items() if job}
    if word is None:
        return jobs[_the_only(jobs)]
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
    """The run that ``word`` means, running or ended.

    A run id is the newest run that has it. Else it is a name of ``list_known``, a pid, or a part of a name.

    Raises:
        UsageError: there is none, or several may be meant.
    """
    _check_not_empty(word)
    runs = list_known()
    name = next(iter(_with_run_id(word, runs)), None) or _resolve_name(word, runs)
    if name is None:
        raise _unknown_run_error(word, runs)
    found = FoundRun(name, runs[name], past.read_run_record(name))
    if found.running is None and found.record is None:
        raise UsageError(f"the record of {name} cannot be read", f"ddplaunch clean {name}")
    return found


def read_record_of(job: RunningJob) -> RunRecord | None:
    """What the history has of a job, which may have ended since."""
    name = next((name for name in past.list_runs() if name.startswith(job.run_id) and _matches(job, name)), None)
    return past.read_run_record(name) if name else None


def list_known() -> dict[str, RunningJob | None]:
    """All runs of this user by their names, the latest first; those that run with their doors."""
    runs: dict[str, RunningJob | None] = dict.fromkeys(past.list_runs())
    unkept: dict[str, RunningJob | None] = {}
    for job in sorted(list_running(), key=_socket_created_at, reverse=True):
        name = next((name for name in runs if name.startswith(job.run_id) and _matches(job, name)), None)
        if name:
            other, first = runs[name], past.read_run_record(name)
            if other is None:
                runs[name] = job
            elif first and first.pid == job.pid:  # of several nodes on this machine node 0 has the name
                runs[name], unkept[f"{name}.{other.pid}"] = job, other
            else:
                unkept[f"{name}.{job.pid}"] = job
        else:
            unkept[job.run_id if job.run_id not in {*runs, *unkept} else f"{job.run_id}.{job.pid}"] = job
    return {**unkept, **runs}


def _matches(job: RunningJob, name: str) -> bool:
    """Whether this is the record of a job that runs, or did until a moment ago."""
    host = host_name()
    shares = (each for each in past.read_node_records(name) if (each.pid, each.host) == (job.pid, host))
    return any(each.fate is RunState.RUNNING or (each.ended or 0) > _socket_created_at(job) for each in shares)


def _socket_created_at(job: RunningJob) -> float:
    """When its launcher opened its door, in seconds since the epoch; 0 where that is gone."""
    try:
        return os.stat(job.path).st_mtime
    except OSError:
        return 0.0


def _with_run_id(word: str, runs: Mapping[str, RunningJob | None]) -> list[str]:
    """The runs with this run id, the newest first."""
    named_so = [
        name for name in runs if name == word or (name.startswith(f"{word}.") and name[len(word) + 1 :].isdecimal())
    ]
    if named_so == [word]:
        return named_so
    began: dict[str, float] = {}
    for name in named_so:
        job, record = runs[name], past.read_run_record(name)
        if record and record.run_id == word:
            began[name] = record.began
        elif (
            job and not record and job.run_id == word and not read_record_of(job)
        ):  # a further node has no name of its own
            began[name] = _socket_created_at(job)
    return sorted(began, key=began.__getitem__, reverse=True)


def _the_only(jobs: Mapping[str, object]) -> str:
    if not jobs:
        raise UsageError("no job of yours is running here", "ddplaunch ps --all shows those that have ended")
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs are running: name one", join_names(jobs))
    return next(iter(jobs))


def _resolve_name(word: str, runs: Mapping[str, RunningJob | None]) -> str | None:
    """The run with this name or pid, else the only one whose name begins with it, else that has it in its name.

    A number is all that stands between dashes, dots and underscores: a scheduler's job may be meant that is not known
    any more, and no other may be stopped in its place. Runs with the same run id are one: the newest.
    """
    if word in runs:
        return word
    number = word.isdecimal()
    for found in (
        [name for name, job in runs.items() if job and word == str(job.pid)],
        [name for name in runs if name.startswith(word) and not number],
        [name for name in runs if word in (re.split(r"[-._]", name) if number else name) and word[0] != "-"],
    ):
        if len(found) > 1 and not set(found) - set(same := _with_run_id(_run_id_of(found[0], runs), runs)):
            return same[0]
        if len(found) > 1:
            raise UsageError(
                f"{sanitize_line(word, 60)} may mean {len(found)} runs", f"type more of it: {join_names(found)}"
            )
        if found:
            return found[0]
    return None


def _check_not_empty(word: str) -> None:
    if not word:
        raise UsageError("the name of the run is empty", "a variable in the command may have no value")


def _run_id_of(name: str, runs: Mapping[str, RunningJob | None]) -> str:
    job, record = runs[name], past.read_run_record(name)
    return record.run_id if record else job.run_id if job else name


def _unknown_run_error(word: str, runs: Iterable[str]) -> UsageError:
    near = closest_match(word, runs)
    hint = f"did you mean {near}?" if near else "ddplaunch ps --all shows them"
    return UsageError(f"no run is called {sanitize_line(word, 60)}", hint)
