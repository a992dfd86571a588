"""A short look at several running jobs at once: how each stands, and how many collectives a second it enters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.job import client
from ddplaunch.job.client import Unanswered
from ddplaunch.job.requests import JobInspected
from ddplaunch.job.runs import Running
from ddplaunch.job.status import Status

BETWEEN = 0.1  # seconds between the two looks that tell how fast a job is
PATIENCE = 2.0  # seconds in which a launcher must answer: it may be suspended

DEFAULT_GROUP = "0"


class Glance(NamedTuple):
    """One running job."""

    run: str
    job: Running
    status: Status | None  # None where its launcher does not answer
    rate: float | None  # collectives a second; None where it is not known


def begin(jobs: Mapping[str, Running]) -> Callable[[], list[Glance]]:
    """Look at all of these jobs at once, twice each; return what waits for what was seen.

    The caller has something else to do meanwhile.
    """
    looks: dict[str, dict[int, JobInspected]] = {run: {} for run in jobs}

    def look(run: str, job: Running, number: int) -> None:
        with suppress(Unanswered):
            time.sleep(BETWEEN * number)
            looks[run][number] = client.look(job.path, timeout=PATIENCE)

    threads = [
        threading.Thread(target=look, args=(run, job, number), daemon=True)
        for run, job in jobs.items()
        for number in range(2)
    ]
    for thread in threads:
        thread.start()

    def seen() -> list[Glance]:
        for thread in threads:
            thread.join()
        return [_glance(run, job, looks[run].get(0), looks[run].get(1)) for run, job in jobs.items()]

    return seen


def _glance(run: str, job: Running, first: JobInspected | None, second: JobInspected | None) -> Glance:
    last = second or first
    return Glance(run, job, last.status if last else None, rate(first, second) if first and second else None)


def rate(first: JobInspected, second: JobInspected) -> float | None:
    """Collectives a second in the default process group, of the lowest rank that both know."""
    seconds = second.inspection.moment - first.inspection.moment
    before, after = _entered(first), _entered(second)
    both = sorted(before.keys() & after.keys())
    if first.status.attempt != second.status.attempt or not both or seconds <= 0:
        return None
    return max(0.0, (after[both[0]] - before[both[0]]) / seconds)


def _entered(looked: JobInspected) -> dict[int, int]:
    return {
        rank.rank: group.enqueued  # what gloo counts as completed comes late and out of order
        for rank in looked.inspection.ranks
        for group in rank.groups
        if group.group == DEFAULT_GROUP
    }
