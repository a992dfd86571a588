"""How the submitted jobs stand: their schedulers are asked about those that have not ended, and Slurm's nodes too."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ddplaunch.cli.queued import forgotten
from ddplaunch.clusters.slurm import JOB_ID
from ddplaunch.console.runs import Standing
from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError
from ddplaunch.job import submitted
from ddplaunch.job.submitted import Submitted
from ddplaunch.submit.programs import Record
from ddplaunch.submit.qmaster import ACCOUNTED_AFTER
from ddplaunch.submit.queue import JobId, JobRecord, tasks
from ddplaunch.submit.schedulers import scheduler_of
from ddplaunch.submit.step import ask

RECENT = 5  # runs that have ended, and as many submitted jobs, that are shown without --all
LATELY = 86400.0  # seconds
MOST = 20  # jobs that schedulers are asked about
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
            found.append(_look(job, now))
        elif everything or (job.code is not None and now - job.moment < LATELY and over < RECENT):
            over += 1
            found.append(Standing(job, job.ended or "not asked about", job.code, None))
    return _with_ranks(found)


def _look(job: Submitted, now: float) -> Standing:
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
    scheduler = scheduler_of(job)
    try:
        seen = scheduler.look(which)
    except LaunchError:
        return Standing(job, forgotten(job), 1, None)
    if seen is None:
        return Standing(job, f"{scheduler.asked} does not answer", None, None)
    if seen.code is not None:
        submitted.over(job, seen.words, seen.code)
    elif isinstance(seen, Record) and seen.gone:
        if job.gone is None:
            submitted.keep(replace(job, gone=now))
        elif now - job.gone > ACCOUNTED_AFTER:
            return Standing(job, forgotten(job), 1, None)
    return Standing(job, seen.words, seen.code, seen if isinstance(seen, JobRecord) else None)


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
