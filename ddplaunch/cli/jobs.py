"""How the submitted jobs stand: Slurm is asked about those whose end is not known, and node 0 of those that run."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ddplaunch.clusters.slurm import JOB_ID
from ddplaunch.console.runs import Standing
from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError
from ddplaunch.job import submitted
from ddplaunch.job.submitted import Submitted
from ddplaunch.submit.queue import JobId, JobRecord, look, tasks
from ddplaunch.submit.step import ask

RECENT = 5  # runs that have ended, and as many submitted jobs, that are shown without --all
LATELY = 86400.0  # seconds
MOST = 20  # jobs that Slurm is asked about
AT_ONCE = 8  # jobs whose nodes are asked: each is a step of Slurm's


def standings(now: float, *, everything: bool) -> list[Standing]:
    """The jobs that wait or run, and those that have ended lately; ``everything``: all that are kept.

    None within a job, which is where we ask for what runs there.
    """
    if os.environ.get(JOB_ID):
        return []
    found = []
    asked = over = 0
    for job in submitted.every():
        if job.code is None and asked < MOST:
            asked += 1
            found.append(_look(job))
        elif everything or (job.code is not None and now - job.moment < LATELY and over < RECENT):
            over += 1
            found.append(Standing(job, job.ended or "not asked about", job.code, None))
    return _with_ranks(found)


def _look(job: Submitted) -> Standing:
    which = JobId(job.number, job.cluster)
    if job.array:
        records = tasks(which)
        states = Counter(record.state.lower() for record in records)
        words = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        if records and all(record.code is not None for record in records):
            code = max(record.code or 0 for record in records)
            submitted.over(job, words, code)
            return Standing(job, words, code, None)
        return Standing(job, words or "Slurm does not know it, or does not answer", None, None)
    try:
        seen = look(which)
    except LaunchError:
        words = "ended; Slurm has forgotten how"
        submitted.over(job, words, 1)
        return Standing(job, words, 1, None)
    if seen is None:
        return Standing(job, "scontrol does not answer", None, None)
    if seen.code is not None:
        submitted.over(job, seen.words, seen.code)
    return Standing(job, seen.words, seen.code, seen)


def _with_ranks(found: Sequence[Standing]) -> list[Standing]:
    """Ask those that run, all at once, for their ranks and how fast they are."""
    told: dict[str, tuple[int | None, float | None]] = {}

    def look_inside(job: Submitted, seen: JobRecord) -> None:
        with suppress(ValueError):  # the site has printed something else
            for run in json.loads(ask(job, seen, ["ps", "--json"]) or "[]"):
                if str(run["run"]).startswith(job.run) and run["ended"] is None:
                    told[job.number] = (run["world_size"], run["collectives_per_second"])

    threads = [
        threading.Thread(target=look_inside, args=(each.job, each.seen), daemon=True)
        for each in found
        if each.seen and each.seen.state == "RUNNING" and not each.job.image
    ][:AT_ONCE]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        replace(each, world_size=told[each.job.number][0], rate=told[each.job.number][1])
        if each.job.number in told
        else each
        for each in found
    ]
