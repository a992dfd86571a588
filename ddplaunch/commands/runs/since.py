"""``ddplaunch report --since``: the time of all runs of this user, what was lost to what, which hosts were to blame."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import click

from ddplaunch.cli.values import as_seconds
from ddplaunch.console.table import table
from ddplaunch.errors import UsageError, shown
from ddplaunch.job import past
from ddplaunch.job.effective import Spent, percent, told, total
from ddplaunch.job.ledger import Blamed, blamed
from ddplaunch.job.record import Fate, RunRecord
from ddplaunch.words import counted, duration

MAX_HOSTS = 10  # that are shown; --json has all
MAX_WHY = 70  # characters


def report_since(text: str, *, as_json: bool) -> Iterator[str]:
    """The lines for the runs that began in this time before now, as "7d"; UsageError if it is not a time."""
    seconds = as_seconds(text)
    if not seconds or seconds < 0:
        raise UsageError(f"--since {shown(text, 60)}: expected a time, like 12h or 7d", "ddplaunch report --since 7d")
    first = time.time() - seconds
    runs = [each for each in past.records() if each.began >= first and each.fate is not Fate.RUNNING]
    spent, hosts = total(each.spent for each in runs), blamed(runs)
    return iter([_as_json(runs, spent, hosts)]) if as_json else _lines(runs, spent, hosts, seconds)


def _as_json(runs: Sequence[RunRecord], spent: Spent, hosts: Sequence[Blamed]) -> str:
    fields = {"runs": [each.run for each in runs], "effective": spent.share, "spent": vars(spent)}
    return json.dumps({**fields, "hosts": [each._asdict() for each in hosts]}, indent=2)


def _lines(runs: Sequence[RunRecord], spent: Spent, hosts: Sequence[Blamed], seconds: float) -> Iterator[str]:
    lately = f"began in the last {duration(seconds)} and ended"
    yield click.style(told(spent) or f"no run that is kept {lately}", bold=True)
    if not runs:
        return
    lost_ones = sum(each.fate is Fate.LOST for each in runs)
    unknown = f"; the time of {counted(lost_ones, 'lost run')} is known only in part" if lost_ones else ""
    yield f"  {counted(len(runs), 'run')} {lately}{unknown}"
    if lost := spent.lost:
        yield ""
        yield from table(
            ("LOST", "SHARE", ""), [(duration(each), percent(each / spent.wall), why) for each, why in lost]
        )
    if hosts:
        yield ""
        rows = [(each.host, str(each.times), _day(each.last), shown(each.why, MAX_WHY)) for each in hosts[:MAX_HOSTS]]
        yield from table(("HOST", "BLAMED", "LAST", "FOR"), rows)


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
