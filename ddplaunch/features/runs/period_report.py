"""``ddplaunch report --since``: goodput and lost time of all runs of this user, and the hosts on which runs failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import format_count, format_duration
from ddplaunch.base.types import as_dict
from ddplaunch.cli.text_table import format_table
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.features.runs.goodput import format_goodput, format_percent, lost_times, sum_breakdowns
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.blamed_hosts import BlamedHost, find_blamed_hosts
from ddplaunch.observe.history.run_record import RunRecord, RunState
from ddplaunch.observe.history.time_breakdown import TimeBreakdown

MAX_HOSTS = 10  # shown; --json has all
MAX_WHY = 70  # characters


def report_since(text: str, *, as_json: bool) -> Iterator[str]:
    """Yield the lines on the runs that began in the last ``text``, like "7d"; raise UsageError if it is not a time."""
    seconds = parse_seconds(text)
    if not seconds or seconds < 0:
        what = f"--since {sanitize_line(text, 60)}: expected a time, like 12h or 7d"
        raise UsageError(what, "ddplaunch report --since 7d")
    first = time.time() - seconds
    recent = (each for each in history_store.read_all_records() if each.began >= first)
    runs = [each for each in recent if each.fate is not RunState.RUNNING]
    spent, hosts = sum_breakdowns(each.spent for each in runs), find_blamed_hosts(runs)
    return iter([_as_json(runs, spent, hosts)]) if as_json else _format_summary(runs, spent, hosts, seconds)


def _as_json(runs: Sequence[RunRecord], spent: TimeBreakdown, hosts: Sequence[BlamedHost]) -> str:
    fields = {"runs": [each.run for each in runs], "effective": spent.goodput, "time_by_phase": as_dict(spent)}
    return json.dumps({**fields, "hosts": [each._asdict() for each in hosts]}, indent=2)


def _format_summary(
    runs: Sequence[RunRecord], spent: TimeBreakdown, hosts: Sequence[BlamedHost], seconds: float
) -> Iterator[str]:
    period = f"began in the last {format_duration(seconds)} and ended"
    yield click.style(format_goodput(spent) or f"no recorded run {period}", bold=True)
    if not runs:
        return
    lost_runs = sum(each.fate is RunState.LOST for each in runs)
    unknown = f"; the time of {format_count(lost_runs, 'lost run')} is known only in part" if lost_runs else ""
    yield f"  {format_count(len(runs), 'run')} {period}{unknown}"
    if lost := lost_times(spent):
        yield ""
        times = [(format_duration(each), format_percent(each / spent.wall_s), why) for each, why in lost]
        yield from format_table(("LOST", "SHARE", ""), times)
    if hosts:
        yield ""
        rows = [
            (each.host, str(each.times), _format_moment(each.last), sanitize_line(each.why, MAX_WHY))
            for each in hosts[:MAX_HOSTS]
        ]
        yield from format_table(("HOST", "FAILURES", "LAST", "REASON"), rows)


def _format_moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
