"""``ddplaunch report``: how a run ended and why, its attempts, what each rank used."""

from __future__ import annotations

import click

from ddplaunch.cli.run_command import PathType
from ddplaunch.commands.runs.account import render
from ddplaunch.commands.runs.array import refuse_page
from ddplaunch.commands.runs.array import report as report_all
from ddplaunch.commands.runs.newest import newest_here
from ddplaunch.commands.runs.page import write_page
from ddplaunch.console import colour_wanted
from ddplaunch.errors import LaunchError, UsageError, shown
from ddplaunch.job import logs, past, runs
from ddplaunch.job.record import RunRecord, to_json
from ddplaunch.queue.meant import index_of, job_meant, kept_run, one_of, run_of, running, standing
from ddplaunch.queue.step import relay
from ddplaunch.queue.submitted import Submitted


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.option(
    "--html",
    metavar="FILE",
    type=PathType(dir_okay=False),
    help="Write a page for a browser, which needs nothing else.",
)
def report(run: str | None, as_json: bool, html: str | None) -> int | None:
    """Tell how a run ended: the failure again, its attempts, memory and CPU time of each rank.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the newest run of this folder. Of a
    submitted job, its number; of an array, all in short.
    """
    if as_json and html is not None:
        raise UsageError("--json and --html contradict each other", "leave one of them out")
    if (queued := job_meant(run)) and run:
        told = _of_job(queued, run, as_json, html)
        if isinstance(told, int):
            return told
        run = told
    found = runs.find(run or newest_here())
    shares = past.shares(found.run)
    if not shares:
        what = f"{found.run} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    if html is not None:
        write_page(shares, html)
        return None
    if as_json:
        click.echo(to_json(shares[0]))
        return None
    for line in render(shares, _output(found.run, shares[0])):
        click.echo(line, color=None if colour_wanted() else False)
    return None


def _of_job(job: Submitted, word: str, as_json: bool, html: str | None) -> str | int:
    """The name of the run of a submitted job, where that is kept here; else ask node 0, and return its exit code."""
    if index_of(job, word) == "":
        if html is not None:
            raise refuse_page(job)
        report_all(job, as_json=as_json)
        return 0
    which = one_of(job, word, "report")
    seen = standing(job, which)
    if not seen.waits and (name := kept_run(job, seen)):
        click.echo(f"job {which.typed} {seen.words}", err=True)
        return name
    if seen.code is not None:
        what = f"job {which.typed} {seen.words}; its record is not kept on this machine"
        raise LaunchError(what, f"its report is at the end of {seen.log}")
    there = running(job, which)
    if html is not None:
        raise LaunchError(f"--html: the record of job {which.typed} is on its node {there.host}", "leave --html out")
    return relay(job, there, ["report", run_of(job, there), *(["--json"] if as_json else [])])


def _output(run: str, record: RunRecord) -> str | None:
    """Where what the ranks printed is."""
    if record.log_dir:
        return f"output: ddplaunch logs {run}, or {shown(record.log_dir)}"
    return f"output: ddplaunch logs {run}" if logs.files(run) else None
