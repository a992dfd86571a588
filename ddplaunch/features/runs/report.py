"""``ddplaunch report``: prints the result of a run, its failure, attempts, goodput, and the usage of each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import click
from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line, sanitize_text
from ddplaunch.base.options import PathType
from ddplaunch.base.tty import window_size
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.job_argument import JobCommand, RunName
from ddplaunch.features.runs import history_store, rank_logs, run_lookup
from ddplaunch.features.runs.array_report import page_not_supported
from ddplaunch.features.runs.array_report import print_array as report_all
from ddplaunch.features.runs.default_run import default_run
from ddplaunch.features.runs.html_report import write_page
from ddplaunch.features.runs.html_report.page_inputs import collect_inputs, with_live_state
from ddplaunch.features.runs.job_resolver import (
    end_elsewhere,
    find_recorded_run,
    find_runs_of_job,
    job_state,
    mark_lost,
    nothing_kept_error,
    parse_array_index,
    require_running,
    resolve_job,
    resolve_job_id,
    run_name,
)
from ddplaunch.features.runs.period_report import report_since
from ddplaunch.features.runs.program_usage import with_program_usage
from ddplaunch.features.runs.report_server import serve as serve_page
from ddplaunch.features.runs.report_text import TimeOfRuns, render_report
from ddplaunch.features.runs.run_record import RunRecord, record_to_json
from ddplaunch.features.runs.run_totals import total_time
from ddplaunch.features.runs.time_tracker import BreakdownRequest
from ddplaunch.system.schedulers.job_step import run_on_nodes
from ddplaunch.system.schedulers.scheduler import BatchJobState, SchedulerNotResponding
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

REPLY_TIMEOUT_S = 2.0  # for the launcher of a run: it may be suspended


@click.command(cls=JobCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.option("--html", metavar="FILE", type=PathType(dir_okay=False), help="Write a self-contained HTML page.")
@click.option(
    "--serve", metavar="[PORT]", is_flag=False, flag_value="0", help="Serve that page on this machine until Ctrl-C."
)
@click.option("--since", metavar="TIME", help="Summarize all runs started in the last 7d, 12h, …")
def report(run: str | None, as_json: bool, html: str | None, serve: str | None, since: str | None) -> int | None:
    """Summarize a run: result, failure, attempts, goodput (effective time), memory and CPU time.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the newest run of this
    folder. With the number of a scheduler's job, the time covers all its runs; with that of an array, all tasks are
    summarized.
    """
    page = "--html" if html is not None else "--serve" if serve is not None else ""
    if since is not None:
        _print_period_report(since, run, as_json, page)
        return None
    given = {"--serve": serve is not None, "--json": as_json, "--html": html is not None}
    if len(forms := [name for name, wanted in given.items() if wanted]) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} contradict each other", "leave one of them out")
    of_job, seen = list[RunRecord](), None
    if (queued := resolve_job(run)) and run:
        result = _report_of_job(queued, run, as_json, page)
        if isinstance(result, int):
            return result
        run, of_job, seen = result
    elif run and (of_job := _runs_of_job(run)):
        run = of_job[-1].run
    found = run_lookup.find_run(default_run() if run is None else run)
    shares = [with_program_usage(each) for each in history_store.read_node_records(found.run)]
    if not shares:
        what = f"{found.run} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    if not found.running:
        seen = seen or _end_elsewhere(shares)
        shares = mark_lost(shares, seen)
    if serve is not None:
        serve_page(found.run, serve, seen)
        return None
    if found.running:
        shares = [_with_live_times(found.running.path, shares[0]), *shares[1:]]
    before = mark_lost([each for each in of_job if each.run != found.run], seen)
    total = TimeOfRuns([*before, shares[0]], total_time([*before, shares[0]], queued.moment if queued else None))
    if html is not None:
        known = collect_inputs(found, shares, effective=total.line)
        write_page(with_live_state(found, shares, known), html, known)
        return None
    if as_json:
        click.echo(record_to_json(shares[0], total.runs, total.spent))
        return None
    across = window_size(1)[0] if os.isatty(1) else None
    for line in render_report(shares, total, _output_location(found.run, shares[0]), across):
        click.echo(line, color=None if is_colour_allowed() else False)
    return None


def _print_period_report(since: str, run: str | None, as_json: bool, page: str) -> None:
    if run or page:
        other = page or sanitize_line(run or "", 60)
        what = f"--since {sanitize_line(since, 60)} is for all runs, not for {other}"
        raise UsageError(what, "leave one of them out")
    for line in report_since(since, as_json=as_json):
        click.echo(line, color=None if is_colour_allowed() else False)


def _runs_of_job(word: str) -> list[RunRecord]:
    """List the runs of the batch job with this id, the first one first."""
    found = history_store.read_all_records() if word.replace("_", "").isdecimal() else ()
    return sorted((each for each in found if each.job == word), key=lambda each: each.began)


def _with_live_times(path: str, record: RunRecord) -> RunRecord:
    """Return the record of a running run, with its time breakdown until now if its launcher replies."""
    try:
        return replace(record, spent=client.send_request(path, BreakdownRequest(), REPLY_TIMEOUT_S).spent)
    except JobNotResponding as error:
        click.echo("; ".join(filter(None, (error.message, error.hint))), err=True)
        return record


def _end_elsewhere(shares: Sequence[RunRecord]) -> BatchJobState | None:
    """Ask the scheduler how the job of a run ended, if the record of the run has no end; print it too."""
    try:
        seen = end_elsewhere(shares)
    except LaunchError as error:
        click.echo("; ".join(filter(None, (error.message, error.hint))), err=True)
        return None
    if seen:
        click.echo(f"job {shares[0].job} {seen.description}", err=True)
    return seen


def _report_of_job(
    job: SubmittedJob, word: str, as_json: bool, page: str
) -> tuple[str, list[RunRecord], BatchJobState | None] | int:
    """Return a submitted job's newest run, its recorded runs, its state; or print its report, and return an exit code.

    Without a record here, node 0 of a running job prints the report. The state is None if the scheduler does not
    answer, and the record shows what it knows.
    """
    if parse_array_index(job, word) == "":
        if page:
            raise page_not_supported(job, page)
        report_all(job, as_json=as_json)
        return 0
    which = resolve_job_id(job, word, "report")
    try:
        seen = job_state(job, which)
    except SchedulerNotResponding:
        known = BatchJobState("", number=job.number)
        records = [] if which.index else find_runs_of_job(job, known)
        if not records:
            raise
        return records[-1].run, records, None
    if not seen.is_pending and (name := find_recorded_run(job, seen)):
        click.echo(f"job {which.text} {seen.description}", err=True)
        records = find_runs_of_job(job, seen)
        return (records[-1].run if records else name), records, seen
    if (seen.is_pending or (seen.code is not None and not job.log)) and not page:
        content = {"job": which.text, "state": seen.description, "code": seen.code}
        text = f"job {which.text} {seen.description}"
        if seen.last_lines:
            content |= {"last_lines": seen.last_lines}
            text += f"; a rank that failed printed last:\n{sanitize_text(seen.last_lines)}"
        click.echo(json.dumps(content, indent=2) if as_json else text)
        return 0
    if seen.code is not None and not os.path.exists(seen.log_path or ""):
        raise nothing_kept_error(which, seen)
    if seen.code is not None:
        what = f"job {which.text} {seen.description}; its record is not on this machine"
        raise LaunchError(what, f"its report is at the end of {seen.log_path}")
    there = require_running(job, which)
    if page:
        where = f"its node {there.host}" if there.host else "its first node"
        raise LaunchError(f"{page}: the record of job {which.text} is on {where}", f"leave {page} out")
    return run_on_nodes(job, there, ["report", run_name(job, there), *(["--json"] if as_json else [])])


def _output_location(run: str, record: RunRecord) -> str | None:
    """Return the line that says where the output of the ranks is; None if there is none."""
    if record.log_dir:
        return f"output: ddplaunch logs {run}, or {sanitize_line(record.log_dir)}"
    return f"output: ddplaunch logs {run}" if rank_logs.rank_log_files(run) else None
