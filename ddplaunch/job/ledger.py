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
from ddplaunch.job.effective import Spent, total
from ddplaunch.job.record import RunRecord

PROPOSED = 2  # times that a host was to blame lately, from which on ``submit`` names it
PATIENCE = 1.0  # seconds for reading the history at each ``submit``
LATELY = 7 * 86400.0  # seconds


class Blamed(NamedTuple):
    """A host that was to blame."""

    host: str
    times: int
    last: float  # when it was so last, in seconds since the epoch
    why: str  # then


def joined(runs: Sequence[RunRecord], submitted: float | None = None) -> Spent:
    """The time of all runs of one job, the first one's first; between them, and since it was ``submitted``, it waited.

    Time in which the job had no run counts as queued.
    """
    spent, over = total(each.spent for each in runs), submitted
    queued = 0.0
    for each in runs:
        if over is not None:
            queued += max(0.0, each.began - over)
        over = max(over or 0.0, each.began + each.spent.wall)
    return replace(spent, queued=spent.queued + queued)


def blamed(records: Iterable[RunRecord]) -> list[Blamed]:
    """The hosts that were lost, or on which ranks failed by no fault of the program's, the most blamed first."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        for host, moment, why in _blames(record):
            found.setdefault(host, []).append((moment, why))
    hosts = [Blamed(host, len(times), *max(times)) for host, times in found.items()]
    return sorted(hosts, key=lambda each: (-each.times, -each.last, each.host))


def proposed(now: float) -> list[Blamed]:
    """The hosts of scheduler's jobs that were to blame again and again lately, as far as PATIENCE seconds tell."""
    until = time.monotonic() + PATIENCE
    seen = itertools.takewhile(lambda each: time.monotonic() < until, past.records())  # the latest first
    lately = (each for each in seen if each.job and each.began > now - LATELY)
    return [each for each in blamed(lately) if each.times >= PROPOSED]


def _blames(record: RunRecord) -> Iterator[tuple[str, float, str]]:
    for host in record.lost:
        yield host, record.ended or record.began + record.spent.wall, "the node was lost"
    for attempt in record.attempts:
        if attempt.verdict is None:
            continue
        first = attempt.verdict.first
        outside = is_transient(first) or first.exit_code == EXIT_TIMEOUT
        if outside and not first.is_consequence and first.host:
            yield first.host, first.moment, first.headline
