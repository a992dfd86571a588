"""The records of a run that goes on, with what the history does not have yet: it is written as each attempt ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ddplaunch.commands.runs.page.run import Beside
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.inspection import Detail
from ddplaunch.diagnosis.readings import whole
from ddplaunch.errors import LaunchError
from ddplaunch.job import client
from ddplaunch.job.record import Attempt, RankRecord, RunRecord
from ddplaunch.job.requests.inspection import InspectJob, JobInspected
from ddplaunch.job.runs import Found
from ddplaunch.job.status import RankState, RankStatus, Status

PATIENCE = 5.0  # seconds in which the job must answer: its launcher may be suspended


class _Known(NamedTuple):
    """What readings tell of a rank."""

    started: float
    memory: int
    cpu: float


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
    before, last = record.attempts, _begun(record, seen.status)
    if before and before[-1].number == last.number:
        before = before[:-1]
    stand = {each.rank: each for each in seen.status.ranks}
    used: dict[int, _Known] = {}
    for node in known.readings:
        its = [each for each in node if each.attempt == last.number]
        if all_ := whole(its):
            began = its[0].time - its[0].seconds
            used |= {
                row.rank: _Known(began, int(row.memory or 0), all_.seconds * (row.cpus or 0)) for row in all_.ranks
            }
    ranks = tuple(_rank_as_seen(each, stand.get(each.rank), used.get(each.rank), last.began) for each in last.ranks)
    attempts = (*before, replace(last, ranks=ranks))
    seen_now = (*record.inspections, seen.inspection)
    return replace(record, attempts=attempts, inspections=seen_now, spent=seen.status.spent)


def _begun(record: RunRecord, status: Status) -> Attempt:
    """The attempt that runs: of the first the history has the beginning, of others the end of the one before."""
    if not record.attempts:
        return Attempt(max(0, status.attempt), status.since)
    last = record.attempts[-1]
    if last.number >= status.attempt:
        return last
    hosts = {each.rank: each.host for each in last.ranks}
    ranks = tuple(RankRecord(each.rank, hosts.get(each.rank, record.host)) for each in status.ranks)
    return Attempt(status.attempt, last.ended or status.since, ranks=ranks)


def _rank_as_seen(rank: RankRecord, stands: RankStatus | None, used: _Known | None, began: float) -> RankRecord:
    if stands is None or not stands.pid or rank.started:
        return rank
    over = time.time() if stands.state is RankState.EXITED else None
    started, memory, cpu = used or _Known(began, 0, 0.0)
    return replace(rank, pid=stands.pid, started=started, ended=over, code=stands.code, peak_memory=memory, cpu=cpu)
