"""``ddplaunch report``: how a run ended and why, its attempts, what each rank used."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ddplaunch.cli.on_host import HostCommand
from ddplaunch.cli.run_command import PathType, RunName
from ddplaunch.commands.runs.account import Whole, render
from ddplaunch.commands.runs.array import refuse_page
from ddplaunch.commands.runs.array import report as report_all
from ddplaunch.commands.runs.newest import newest_here
from ddplaunch.commands.runs.page import write_page
from ddplaunch.commands.runs.page.kept import as_it_runs, beside
from ddplaunch.commands.runs.since import report_since
from ddplaunch.console import colour_wanted
from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError, UsageError, shown
from ddplaunch.job import client, logs, past, runs
from ddplaunch.job.client import NoAnswer
from ddplaunch.job.ledger import joined
from ddplaunch.job.record import RunRecord, to_json
from ddplaunch.job.requests.status import AskStatus
from ddplaunch.queue.meant import (
    end_elsewhere,
    index_of,
    job_meant,
    kept_run,
    kept_runs,
    one_of,
    run_of,
    running,
    standing,
    without_end,
)
from ddplaunch.queue.scheduler import JobState
from ddplaunch.queue.step import relay
from ddplaunch.queue.submitted import Submitted

PATIENCE = 2.0  # seconds in which the launcher of a run must answer: it may be suspended


@click.command(cls=HostCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.option(
    "--html",
    metavar="FILE",
    type=PathType(dir_okay=False),
    help="Write a page for a browser, which needs nothing else.",
)
@click.option(
    "--serve",
    metavar="[PORT]",
    is_flag=False,
    flag_value="0",
    help="Show that page in a browser on this machine, renewed while the job runs; until Ctrl-C.",
)
@click.option("--since", metavar="TIME", help="Tell of all runs that began in this time, like 7d or 12h.")
def report(run: str | None, as_json: bool, html: str | None, serve: str | None, since: str | None) -> int | None:
    """Tell how a run ended: its effective time, the failure again, its attempts, memory and CPU time of each rank.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the newest run of this folder. Of a
    job of a scheduler, its number: the time is that of all its runs; of an array, all in short.
    """
    page = "--html" if html is not None else "--serve" if serve is not None else ""
    if since is not None:
        _of_all(since, run, as_json, page)
        return None
    typed = {"--serve": serve is not None, "--json": as_json, "--html": html is not None}
    if len(forms := [name for name, wanted in typed.items() if wanted]) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} contradict each other", "leave one of them out")
    of_job, seen = list[RunRecord](), None
    if (queued := job_meant(run)) and run:
        answer = _of_job(queued, run, as_json, page)
        if isinstance(answer, int):
            return answer
        run, of_job, seen = answer
    elif run and (of_job := _by_number(run)):
        run = of_job[-1].run
    found = runs.find(newest_here() if run is None else run)
    shares = past.shares(found.run)
    if not shares:
        what = f"{found.run} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    if not found.running:
        seen = seen or _end_elsewhere(shares)
        shares = without_end(shares, seen)
    if serve is not None:
        from ddplaunch.commands.runs.serve import serve as serve_page

        serve_page(found.run, serve, seen)
        return None
    if found.running:
        shares = [_as_it_stands(found.running.path, shares[0]), *shares[1:]]
    before = without_end([each for each in of_job if each.run != found.run], seen)
    whole = Whole([*before, shares[0]], joined([*before, shares[0]], queued.moment if queued else None))
    if html is not None:
        known = beside(found, shares, effective=whole.line)
        write_page(as_it_runs(found, shares, known), html, known)
        return None
    if as_json:
        click.echo(to_json(shares[0], whole.runs, whole.spent))
        return None
    for line in render(shares, whole, _output(found.run, shares[0])):
        click.echo(line, color=None if colour_wanted() else False)
    return None


def _of_all(since: str, run: str | None, as_json: bool, page: str) -> None:
    if run or page:
        other = page or f"a run, here {shown(run or '', 60)}"
        raise UsageError(f"--since {shown(since, 60)} is of all runs: not with {other}", "leave one of them out")
    for line in report_since(since, as_json=as_json):
        click.echo(line, color=None if colour_wanted() else False)


def _by_number(word: str) -> list[RunRecord]:
    """The runs that ran in the scheduler's job of this number, the first one first."""
    found = past.records() if word.replace("_", "").isdecimal() else ()
    return sorted((each for each in found if each.job == word), key=lambda each: each.began)


def _as_it_stands(door: str, record: RunRecord) -> RunRecord:
    """The record of a run that goes on, with where its time went until now, if its launcher answers."""
    try:
        return replace(record, spent=client.ask(door, AskStatus(), PATIENCE).spent)
    except NoAnswer as error:
        click.echo("; ".join(filter(None, (error.message, error.hint))), err=True)
        return record


def _end_elsewhere(shares: Sequence[RunRecord]) -> JobState | None:
    """How the job of a run has ended, by its scheduler, where the record of the run has no end; printed."""
    try:
        seen = end_elsewhere(shares)
    except LaunchError as error:
        click.echo("; ".join(filter(None, (error.message, error.hint))), err=True)
        return None
    if seen:
        click.echo(f"job {shares[0].job} {seen.words}", err=True)
    return seen


def _of_job(job: Submitted, word: str, as_json: bool, page: str) -> tuple[str, list[RunRecord], JobState] | int:
    """The newest run of a submitted job, all that are kept here, its state; else node 0's answer, as an exit code."""
    if index_of(job, word) == "":
        if page:
            raise refuse_page(job, page)
        report_all(job, as_json=as_json)
        return 0
    which = one_of(job, word, "report")
    seen = standing(job, which)
    if not seen.waits and (name := kept_run(job, seen)):
        click.echo(f"job {which.typed} {seen.words}", err=True)
        its = kept_runs(job, seen)
        return (its[-1].run if its else name), its, seen
    if seen.code is not None:
        what = f"job {which.typed} {seen.words}; its record is not kept on this machine"
        raise LaunchError(what, f"its report is at the end of {seen.log}")
    there = running(job, which)
    if page:
        raise LaunchError(f"{page}: the record of job {which.typed} is on its node {there.host}", f"leave {page} out")
    return relay(job, there, ["report", run_of(job, there), *(["--json"] if as_json else [])])


def _output(run: str, record: RunRecord) -> str | None:
    """Where what the ranks printed is."""
    if record.log_dir:
        return f"output: ddplaunch logs {run}, or {shown(record.log_dir)}"
    return f"output: ddplaunch logs {run}" if logs.files(run) else None
