"""Which run is meant: by its name, a part of that, its launcher's pid, or no word where only one can be meant."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ddplaunch.errors import UsageError, shown
from ddplaunch.job import past
from ddplaunch.job.folder import doors
from ddplaunch.job.record import Fate, Record
from ddplaunch.words import named, nearest


class Running(NamedTuple):
    """A job of this user that runs on this machine."""

    path: str  # of its door
    run_id: str  # as its door has it: the first 40 bytes
    pid: int  # the launcher's


class Found(NamedTuple):
    """A run: its door while it runs, what the history has of it; at least one of them."""

    run: str
    running: Running | None
    record: Record | None


def all_running() -> list[Running]:
    """The jobs of this user that run on this machine; their launchers may have been suspended."""
    found = []
    for path in doors():
        run_id, _, pid = os.path.basename(path).rpartition(".")
        found.append(Running(path, run_id, int(pid)))
    return found


def running(word: str | None) -> Running:
    """The running job that ``word`` means; None is the only one.

    Raises:
        UsageError: there is none, or several may be meant.
    """
    jobs = {name: job for name, job in known().items() if job}
    if word is None:
        return jobs[_only(jobs)]
    if name := _meant(word, jobs):
        return jobs[name]
    if word in past.names():
        raise UsageError(f"{word} has ended", f"ddplaunch report {word}")
    raise _unknown(word, jobs)


def find(word: str | None) -> Found:
    """The run that ``word`` means, running or ended; None is the latest.

    Raises:
        UsageError: there is none, or several may be meant.
    """
    runs = known()
    if word is None:
        if not runs:
            raise UsageError("no run is kept or running", "ddplaunch run train.py")
        name = next(iter(runs))
    elif (meant := _meant(word, runs)) is None:
        raise _unknown(word, runs)
    else:
        name = meant
    found = Found(name, runs[name], past.record(name))
    if found.running is None and found.record is None:
        raise UsageError(f"the record of {name} cannot be read", f"ddplaunch clean {name}")
    return found


def known() -> dict[str, Running | None]:
    """All runs of this user by their names, the latest first; those that run with their doors."""
    runs: dict[str, Running | None] = dict.fromkeys(past.names())
    unkept: dict[str, Running | None] = {}
    for job in all_running():
        name = next((name for name in runs if name.startswith(job.run_id) and _is(job, name)), None)
        if name:
            other, first = runs[name], past.record(name)
            if other is None:
                runs[name] = job
            elif first and first.pid == job.pid:  # of several nodes on this machine node 0 has the name
                runs[name], unkept[f"{name}.{other.pid}"] = job, other
            else:
                unkept[f"{name}.{job.pid}"] = job
        else:
            unkept[job.run_id if job.run_id not in {*runs, *unkept} else f"{job.run_id}.{job.pid}"] = job
    return {**unkept, **runs}


def _is(job: Running, name: str) -> bool:
    host = os.uname().nodename
    return any((each.pid, each.host, each.fate) == (job.pid, host, Fate.RUNNING) for each in past.shares(name))


def _only(jobs: Mapping[str, object]) -> str:
    if not jobs:
        raise UsageError("no job of yours is running here", "ddplaunch ps --all shows those that have ended")
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs are running: name one", named(jobs))
    return next(iter(jobs))


def _meant(word: str, runs: Mapping[str, Running | None]) -> str | None:
    """The run with this name or pid, else the only one whose name begins with it, else that has it in its name."""
    if word in runs:
        return word
    for found in (
        [name for name, job in runs.items() if job and word == str(job.pid)],
        [name for name in runs if name.startswith(word)],
        [name for name in runs if word in name],
    ):
        if len(found) > 1:
            raise UsageError(f"{shown(word, 60)} may mean {len(found)} runs", f"type more of it: {named(found)}")
        if found:
            return found[0]
    return None


def _unknown(word: str, runs: Iterable[str]) -> UsageError:
    near = nearest(word, runs)
    hint = f"did you mean {near}?" if near else "ddplaunch ps --all shows them"
    return UsageError(f"no run is called {shown(word, 60)}", hint)
