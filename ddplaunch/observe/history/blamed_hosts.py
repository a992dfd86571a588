"""The hosts on which runs failed by no fault of the program."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.core.job.restart_policy import is_transient
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord

MIN_BLAMES = 2  # failures on a host in RECENT_S, from which on ``submit`` suggests --exclude
READ_TIMEOUT_S = 1.0  # for reading the history at each ``submit``
RECENT_S = 7 * 86400.0


class BlamedHost(NamedTuple):
    """A host on which runs failed by no fault of the program."""

    host: str
    times: int
    last: float  # the last failure, in seconds since the epoch
    why: str  # of the last failure


def find_blamed_hosts(records: Iterable[RunRecord]) -> list[BlamedHost]:
    """Find the hosts that were lost or on which ranks failed by no fault of the program, the most frequent first."""
    failures: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        for host, moment, why in _list_blamed_hosts(record):
            failures.setdefault(host, []).append((moment, why))
    hosts = [BlamedHost(host, len(times), *max(times)) for host, times in failures.items()]
    return sorted(hosts, key=lambda each: (-each.times, -each.last, each.host))


def find_hosts_to_exclude(now: float) -> list[BlamedHost]:
    """Find the hosts on which batch jobs failed repeatedly in RECENT_S; reads runs for READ_TIMEOUT_S at most."""
    deadline = time.monotonic() + READ_TIMEOUT_S
    latest_first = history_store.read_all_records()
    records = itertools.takewhile(lambda each: time.monotonic() < deadline, latest_first)
    recent = (each for each in records if each.job and each.began > now - RECENT_S)
    return [each for each in find_blamed_hosts(recent) if each.times >= MIN_BLAMES]


def _list_blamed_hosts(record: RunRecord) -> Iterator[tuple[str, float, str]]:
    for host in record.lost:
        yield host, record.last_seen, "the node was lost"
    for attempt in record.attempts:
        if attempt.verdict is None:
            continue
        first = attempt.verdict.first
        outside = is_transient(first) or first.exit_code == EXIT_TIMEOUT
        if outside and not first.is_secondary and first.host:
            yield first.host, first.moment, first.headline
