"""The data model of the page: a run, merged from the records of its nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum

from msgspec import Struct, field

from ddplaunch.base.errors import EXIT_TIMEOUT
from ddplaunch.base.text import signal_name
from ddplaunch.core.failures import FailureReport, describe_exit
from ddplaunch.observe.history.run_record import RankRecord, RunRecord
from ddplaunch.observe.history.sample_file import SavedPlan
from ddplaunch.observe.samples.sample import NodeSample, RankSample, average

REFRESH_S = 5  # between two reloads of a page that is served


class RankOutcome(Enum):
    """How a rank ended; the value is its class in the style sheet."""

    WELL = "well"
    FAILED = "failed"  # failed first, or in the same way as the first
    SECONDARY = "fell"  # failed after that, or because it had waited for another rank
    STOPPED = "stopped"  # was stopped by ddplaunch, or from outside
    RUNNING = "running"
    UNKNOWN = "unknown"


class RankRow(Struct, frozen=True):
    """One rank in one attempt."""

    attempt: int
    rank: RankRecord
    end: RankOutcome
    stopped_by_us: bool = False  # ddplaunch ended it by a signal, though it counts as failed

    @property
    def outcome_text(self) -> str:
        """How the rank ended: "exited with code 1"."""
        if self.end is RankOutcome.RUNNING:
            return "was running"
        if (self.stopped_by_us or self.end is RankOutcome.STOPPED) and (self.rank.code or 0) < 0:
            return f"was stopped ({signal_name(-(self.rank.code or 0))})"
        return "ended" if self.rank.code is None else describe_exit(self.rank.code)


class PageAttempt(Struct, frozen=True):
    """One attempt, with the ranks of all nodes that have a record here; ``ended`` may be an estimate."""

    number: int
    began: float
    ended: float
    rows: tuple[RankRow, ...]  # in order of rank
    why: str
    verdict: FailureReport | None


class PageInputs(Struct, frozen=True):
    """The inputs of the page besides the records of a run."""

    readings: tuple[Sequence[NodeSample], ...] = ()  # the samples of each node
    printed: Mapping[int, bytes] = field(default_factory=dict)  # the last output, by rank
    failed_first: Sequence[int] = ()  # the ranks that matter most: those that failed, the first cause first
    plan: SavedPlan | None = None
    live: bool = False  # whether the page is served while the job runs
    effective: str = ""  # the line on goodput
    printed_in: int | None = None  # the attempt of that output, if known


class PageRun(Struct, frozen=True):
    """A run for the page; times in seconds since the epoch."""

    first: RunRecord  # node 0's, or the lowest node's with a record here
    shares: tuple[RunRecord, ...]
    attempts: tuple[PageAttempt, ...]
    began: float
    ended: float  # if no end is recorded, the last known moment of the run
    verdict: FailureReport | None
    inputs: PageInputs

    @classmethod
    def from_records(cls, shares: Sequence[RunRecord], inputs: PageInputs) -> PageRun:
        """Merge the records of a run's nodes; there is at least one."""
        began = min(each.began for each in shares)
        ended = max((each.ended for each in shares if each.ended), default=0.0) or max(map(_last_moment, shares))
        numbers = sorted({attempt.number for each in shares for attempt in each.attempts})
        tries = tuple(_build_attempt(shares, number, ended) for number in numbers)
        verdict = next((each.verdict for each in shares if each.verdict), None)
        return cls(shares[0], tuple(shares), tries, began, max(ended, began), verdict, inputs)

    @property
    def name(self) -> str:
        return self.first.run

    @property
    def total(self) -> float:
        """The duration in seconds, never 0."""
        return max(self.ended - self.began, 1e-3)

    def percent_at(self, moment: float) -> float:
        """Return the position of a moment, in per cent of the duration."""
        return 100 * min(1.0, max(0.0, (moment - self.began) / self.total))

    @property
    def stalls(self) -> list[tuple[float, float]]:
        """The periods in which ranks made no progress, merged from the records of all nodes."""
        periods: list[tuple[float, float]] = []
        for begin, end in sorted(each for share in self.shares for each in share.stalls):
            if periods and begin <= periods[-1][1]:
                periods[-1] = periods[-1][0], max(end, periods[-1][1])
            else:
                periods.append((begin, end))
        return periods

    @property
    def average_samples(self) -> dict[int, RankSample]:
        """The average sample of each rank, as far as there are samples."""
        nodes = filter(None, map(average, self.inputs.readings))
        return {row.rank: row for node in nodes for row in node.ranks}

    @property
    def hosts(self) -> dict[int, str]:
        """The last host of each rank."""
        return {row.rank.rank: row.rank.host for each in self.attempts for row in each.rows}


def _build_attempt(shares: Sequence[RunRecord], number: int, ended: float) -> PageAttempt:
    parts = [each for share in shares for each in share.attempts if each.number == number]
    verdict = next((each.verdict for each in parts if each.verdict), None)
    failures = (verdict.first, *verdict.others) if verdict else ()
    stopped_by_us = {each.rank for each in failures if each.signal is None}
    ranks = [rank for part in parts for rank in part.ranks]
    rows = [RankRow(number, rank, _rank_outcome(rank, verdict), rank.rank in stopped_by_us) for rank in ranks]
    known = [each.ended for each in parts if each.ended]
    return PageAttempt(
        number,
        min(each.began for each in parts),
        max(known) if len(known) == len(parts) else ended,
        tuple(sorted(rows, key=lambda row: row.rank.rank)),
        (verdict.blame if verdict else None) or next((each.why for each in parts if each.why), ""),
        verdict,
    )


def _rank_outcome(rank: RankRecord, verdict: FailureReport | None) -> RankOutcome:
    if rank.ended is None:
        return RankOutcome.RUNNING if rank.started else RankOutcome.UNKNOWN
    if verdict and rank.rank in (verdict.first.rank, *verdict.alike):
        by_a_limit = verdict.first.exit_code == EXIT_TIMEOUT != rank.code  # the others had waited for this one
        return RankOutcome.SECONDARY if verdict.blame and not by_a_limit else RankOutcome.FAILED
    if verdict and any(rank.rank == other.rank for other in verdict.others):
        return RankOutcome.SECONDARY
    if rank.code is None:
        return RankOutcome.UNKNOWN
    return RankOutcome.WELL if rank.code == 0 else RankOutcome.STOPPED


def _last_moment(record: RunRecord) -> float:
    """Return the last known moment of a run without recorded end: now, if it is running."""
    if record.fate.value == "running":
        return time.time()
    ranks = [rank for attempt in record.attempts for rank in attempt.ranks]
    moments = [moment for rank in ranks for moment in (rank.started, rank.ended) if moment]
    seen = [each.moment for each in record.inspections]
    return max([record.began + record.spent.wall_s, *(each.began for each in record.attempts), *moments, *seen])


def time_of_day(seconds: float) -> str:
    """Format a time with its offset from UTC: "2026-11-22 15:50:25 +01:00"."""
    try:
        text = datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
        return f"{text[:19]} {text[19:]}"
    except (ValueError, OverflowError, OSError):  # out of range
        return "at an unknown time"
