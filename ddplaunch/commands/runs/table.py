"""The jobs of a user, running and ended, as lines of text and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from ddplaunch.dataclass import dataclass
from ddplaunch.job.glance import Glance
from ddplaunch.job.record import Fate, Record
from ddplaunch.queue.scheduler import Record as Seen
from ddplaunch.queue.submitted import Submitted
from ddplaunch.words import span

MAX_TARGET = 60  # characters

_COLOURS = {Fate.DONE: "green", Fate.FAILED: "red", Fate.LOST: "red"}


@dataclass(frozen=True)
class Standing:
    """How a submitted job stands."""

    job: Submitted
    words: str  # what to say about it, after "job 7"
    code: int | None  # its exit code; None while it runs or waits
    seen: Seen | None  # what its scheduler says of it; None where that is not known
    world_size: int | None = None  # both None where its node 0 was not asked, or does not answer
    rate: float | None = None  # collectives a second


def render(running: Sequence[Glance], jobs: Sequence[Standing], ended: Sequence[Record], now: float) -> Iterator[str]:
    """The lines of ``ddplaunch ps``, with ANSI styles; ``now`` in seconds since the epoch."""
    if running:
        heads = ("RUN", "STATE", "AGE", "RANKS", "COLLECTIVES/S", "PID", "TARGET")
        yield from table(heads, [_running_row(each, now) for each in running])
    if running and (jobs or ended):
        yield ""
    if jobs:
        heads = ("JOB", "SUBMITTED", "NODES", "RANKS", "COLLECTIVES/S", "TARGET", "STATE")
        yield from table(heads, [_job_row(each, now) for each in jobs])
    if jobs and ended:
        yield ""
    if ended:
        rows = [_ended_row(each, now) for each in ended]
        colours = [_COLOURS.get(each.fate) for each in ended]
        yield from table(("RUN", "STATE", "ENDED", "LASTED", "RANKS", "TARGET"), rows, colours)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str | None] = ()) -> Iterator[str]:
    """Columns, each as wide as it must be; ``colours`` are those of the second one in each row."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for number, row in enumerate([heads, *rows]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1]
        if number and colours and (colour := colours[number - 1]):
            cells[1] = click.style(cells[1], fg=colour)
        line = "  ".join(cells).rstrip()
        yield line if number else click.style(line, bold=True)


def _running_row(glance: Glance, now: float) -> tuple[str, ...]:
    status = glance.status
    if status is None:
        return glance.run, "silent", "-", "-", "-", str(glance.job.pid), "its launcher does not answer"
    age, ranks = span(now - status.began), str(status.world_size)
    return glance.run, status.state.value, age, ranks, _rate(glance.rate), str(status.pid), _short(status.target)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _job_row(each: Standing, now: float) -> tuple[str, ...]:
    job = each.job
    ranks = "-" if each.world_size is None else str(each.world_size)
    since, words = f"{span(now - job.moment)} ago", each.words.removeprefix("is ")
    return job.number, since, str(job.nodes), ranks, _rate(each.rate), _short(job.target), words


def _ended_row(record: Record, now: float) -> tuple[str, ...]:
    lasted = "-" if record.ended is None else span(record.ended - record.began)
    since = "-" if record.ended is None else f"{span(now - record.ended)} ago"
    return record.run, state(record), since, lasted, str(record.world_size), _short(record.target)


def state(record: Record) -> str:
    """What has become of a run, in a word or two: "done", "failed (1)"."""
    return f"{record.fate.value} ({record.code})" if record.fate is Fate.FAILED else record.fate.value


def _short(target: str) -> str:
    return target if len(target) <= MAX_TARGET else target[: MAX_TARGET - 1] + "…"


def running_json(glance: Glance) -> dict[str, Any]:
    """A running job as ``ps --json`` has it."""
    status = glance.status
    return {
        "run": glance.run,
        "state": status.state.value if status else None,
        "pid": glance.job.pid,
        "node_rank": status.node_rank if status else None,
        "world_size": status.world_size if status else None,
        "ranks": [each.rank for each in status.ranks] if status else [],
        "attempt": status.attempt if status else None,
        "restarts": status.restarts if status else None,
        "began": status.began if status else None,
        "ended": None,
        "code": None,
        "collectives_per_second": glance.rate,
        "target": status.target if status else None,
    }


def submitted_json(each: Standing) -> dict[str, Any]:
    """A submitted job as ``ps --json`` has it."""
    return {
        "run": each.job.number,
        "state": each.words,
        "pid": None,
        "node_rank": None,
        "world_size": each.world_size,
        "ranks": [],
        "attempt": None,
        "restarts": None,
        "began": each.job.moment,
        "ended": None,
        "code": each.code,
        "collectives_per_second": each.rate,
        "target": each.job.target,
    }


def ended_json(record: Record) -> dict[str, Any]:
    """A run that has ended as ``ps --json`` has it."""
    last = record.attempts[-1] if record.attempts else None
    return {
        "run": record.run,
        "state": record.fate.value,
        "pid": record.pid,
        "node_rank": record.node_rank,
        "world_size": record.world_size,
        "ranks": [each.rank for each in last.ranks] if last else [],
        "attempt": last.number if last else -1,
        "restarts": last.number if last else 0,
        "began": record.began,
        "ended": record.ended,
        "code": record.code,
        "collectives_per_second": None,
        "target": record.target,
    }
