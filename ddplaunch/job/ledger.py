"""What several runs cost together: all those of a scheduler's job, or of a user; and which hosts were to blame."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ddplaunch.control.restarts import is_transient
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_TIMEOUT
from ddplaunch.job import past
from ddplaunch.job.effective import TimeBreakdown, sum_breakdowns
from ddplaunch.job.record import RunRecord

MIN_BLAMES = 2  # times that a host was to blame lately, from which on ``submit`` names it
READ_TIMEOUT_S = 1.0  # seconds for reading the history at each ``submit``
RECENT_S = 7 * 86400.0  # seconds


class BlamedHost(NamedTuple):
    """A host that was to blame."""

    host: str
    times: int
    last: float  # when it was so last, in seconds since the epoch
    why: str  # then


def total_time(runs: Sequence[RunRecord], submitted: float | None = None) -> TimeBreakdown:
    """The time of all runs of one job, the first one's first; between them, and since it was ``submitted``, it waited.

    Time in which the job had no run counts as queued.
    """
    spent, over = sum_breakdowns(each.spent for each in runs), submitted
    queued = 0.0
    for each in runs:
        if over is not None:
            queued += max(0.0, each.began - over)
        over = max(over or 0.0, each.began + each.spent.wall_s)
    return replace(spent, queued=spent.queued + queued)


def find_blamed_hosts(records: Iterable[RunRecord]) -> list[BlamedHost]:
    """The hosts that were lost, or on which ranks failed by no fault of the program's, the most blamed first."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        for host, moment, why in _blames_in(record):
            found.setdefault(host, []).append((moment, why))
    hosts = [BlamedHost(host, len(times), *max(times)) for host, times in found.items()]
    return sorted(hosts, key=lambda each: (-each.times, -each.last, each.host))


def suggest_excludes(now: float) -> list[BlamedHost]:
    """The hosts of scheduler's jobs that were to blame again and again lately, as far as READ_TIMEOUT_S seconds tell."""
    until = time.monotonic() + READ_TIMEOUT_S
    seen = itertools.takewhile(lambda each: time.monotonic() < until, past.read_all_records())  # the latest first
    lately = (each for each in seen if each.job and each.began > now - RECENT_S)
    return [each for each in find_blamed_hosts(lately) if each.times >= MIN_BLAMES]


def _blames_in(record: RunRecord) -> Iterator[tuple[str, float, str]]:
    for host in record.lost:
        yield host, record.ended or record.began + record.spent.wall_s, "the node was lost"
    for attempt in record.attempts:
        if attempt.verdict is None:
            continue
        first = attempt.verdict.first
        outside = is_transient(first) or first.exit_code == EXIT_TIMEOUT
        if outside and not first.is_secondary and first.host:
            yield first.host, first.moment, first.headline
