"""The records of a run that goes on, with what the history does not have yet: it is written as each attempt ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddplaunch.commands.runs.page.run import Beside
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.inspection import Detail
from ddplaunch.diagnosis.readings import whole
from ddplaunch.errors import LaunchError
from ddplaunch.job import client
from ddplaunch.job.record import RankRecord, RunRecord
from ddplaunch.job.requests.inspection import InspectJob, JobInspected
from ddplaunch.job.runs import Found
from ddplaunch.job.status import RankState, RankStatus

PATIENCE = 5.0  # seconds in which the job must answer: its launcher may be suspended


def as_it_runs(found: Found, shares: Sequence[RunRecord], known: Beside) -> list[RunRecord]:
    """The records, with what the ranks of this machine do and have used so far, where the run goes on."""
    if found.running is None:
        return [*shares]
    try:
        seen = client.ask(found.running.path, InspectJob(Detail.WAITS), PATIENCE)
    except LaunchError:  # it has ended in this moment, or is suspended
        return [*shares]
    return [_as_seen(each, seen, known) if each.pid == seen.status.pid else each for each in shares]


def _as_seen(record: RunRecord, seen: JobInspected, known: Beside) -> RunRecord:
    attempts, number = record.attempts, seen.status.attempt
    if attempts and attempts[-1].number == number:
        stand = {each.rank: each for each in seen.status.ranks}
        used: dict[int, tuple[int, float]] = {}
        for node in known.readings:
            if all_ := whole(each for each in node if each.attempt == number):
                used |= {row.rank: (int(row.memory or 0), all_.seconds * (row.cpus or 0)) for row in all_.ranks}
        last = attempts[-1]
        ranks = (_rank_as_seen(each, stand.get(each.rank), *used.get(each.rank, (0, 0.0))) for each in last.ranks)
        attempts = (*attempts[:-1], replace(last, ranks=tuple(ranks)))
    seen_now = (*record.inspections, seen.inspection)
    return replace(record, attempts=attempts, inspections=seen_now, spent=seen.status.spent)


def _rank_as_seen(rank: RankRecord, stands: RankStatus | None, memory: int, cpu: float) -> RankRecord:
    if stands is None or not stands.pid:
        return rank
    over = time.time() if stands.state is RankState.EXITED else None
    return replace(rank, ended=over, code=stands.code, peak_memory=memory, cpu=cpu)
