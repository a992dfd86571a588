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
from ddplaunch.base.types import JsonObject, as_dict
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.lookup.batch_jobs import (
    find_batch_job,
    find_final_state,
    find_recorded_run,
    find_runs_of_job,
    job_state,
    mark_lost,
    no_record_error,
    parse_array_index,
    require_running,
    resolve_job_id,
)
from ddplaunch.cli.lookup.default_run import default_run
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.run_index import find_run
from ddplaunch.features.runs import rank_logs
from ddplaunch.features.runs.array_report import no_page_error
from ddplaunch.features.runs.array_report import print_array as report_all
from ddplaunch.features.runs.goodput import total_breakdown
from ddplaunch.features.runs.html_report import write_page
from ddplaunch.features.runs.html_report.page_inputs import collect_inputs, with_live_state
from ddplaunch.features.runs.period_report import report_since
from ddplaunch.features.runs.program_usage import with_program_usage
from ddplaunch.features.runs.provenance import read_provenance
from ddplaunch.features.runs.report_server import serve as serve_page
from ddplaunch.features.runs.report_text import TimeOfRuns, render_report
from ddplaunch.features.runs.time_tracker import BreakdownRequest
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord, record_to_json
from ddplaunch.system.schedulers.scheduler import BatchJobState, SchedulerNotResponding
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

REPLY_TIMEOUT_S = 2.0  # for the launcher of a run: it may be suspended


class _ReportCommand(JobCommand):
    """Command class of ``report``: for one run, which may be on other hosts, and for the comparison of several."""

    def invoke(self, ctx: click.Context) -> object:
        return click.Command.invoke(self, ctx) if ctx.params["others"] else super().invoke(ctx)


@click.command(cls=_ReportCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.argument("others", nargs=-1, metavar="[RUN]...", type=RunName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
@click.option("--html", metavar="FILE", type=PathType(dir_okay=False), help="Write a self-contained HTML page.")
@click.option(
    "--serve", metavar="[PORT]", is_flag=False, flag_value="0", help="Serve that page on this machine until Ctrl-C."
)
@click.option("--since", metavar="TIME", help="Summarize all runs started in the last 7d, 12h, …")
def report(
    run: str | None, others: tuple[str, ...], as_json: bool, html: str | None, serve: str | None, since: str | None
) -> int | None:
    """Summarize a run: result, failure, attempts, goodput (effective time), memory and CPU time. Or compare several.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the newest run of this
    folder. With the number of a scheduler's job, the time covers all its runs; with that of an array, all tasks are
    summarized.

    With several runs, a table shows what differs: arguments, commit, versions, GPUs; and how they went.
    """
    page = "--html" if html is not None else "--serve" if serve is not None else ""
    if since is not None:
        _print_period_report(since, " ".join([run, *others]) if run else None, as_json, page)
        return None
    given = {"--serve": serve is not None, "--json": as_json, "--html": html is not None}
    if len(forms := [name for name, wanted in given.items() if wanted]) > 1:
        raise UsageError(f"{forms[0]} and {forms[1]} contradict each other", "leave one of them out")
    of_job, seen = list[RunRecord](), None
    if run and others:
        _compare([run, *others], as_json=as_json, html=html, serve=serve)
        return None
    if (queued := find_batch_job(run)) and run:
        result = _report_of_job(queued, run, as_json, page)
        if isinstance(result, int):
            return result
        run, of_job, seen = result
    elif run and (of_job := _runs_of_job(run)):
        run = of_job[-1].run
    target_run = find_run(default_run() if run is None else run)
    shares = [with_program_usage(each) for each in history_store.read_node_records(target_run.run)]
    if not shares:
        what = f"{target_run.run} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    if not target_run.running:
        seen = seen or _query_job_end(shares)
        shares = mark_lost(shares, seen)
    if serve is not None:
        serve_page(target_run.run, serve, seen)
        return None
    if target_run.running:
        shares = [_with_live_times(target_run.running.path, shares[0]), *shares[1:]]
    before = mark_lost([each for each in of_job if each.run != target_run.run], seen)
    total = TimeOfRuns([*before, shares[0]], total_breakdown([*before, shares[0]], queued.moment if queued else None))
    if html is not None:
        known = collect_inputs(target_run, shares, effective=total.line)
        write_page(with_live_state(target_run, shares, known), html, known)
        return None
    provenance = read_provenance(target_run.run, shares[0].node_rank)
    if as_json:
        click.echo(record_to_json(shares, total.runs, total.spent, provenance))
        return None
    across = window_size(1)[0] if os.isatty(1) else None
    for line in render_report(shares, total, _output_location(target_run.run, shares[0]), across, provenance):
        click.echo(line, color=None if is_colour_allowed() else False)
    return None


def _compare(words: Sequence[str], *, as_json: bool, html: str | None, serve: str | None) -> None:
    """Print what differs between runs, and how they went."""
    if serve is not None:
        raise UsageError(f"--serve is for one run, not for {len(words)}", "--html FILE writes the page of several")
    from ddplaunch.features.runs.comparison_report import format_comparison  # with the options of run: 30 ms

    across = window_size(1)[0] if os.isatty(1) else None
    for line in format_comparison(words, as_json=as_json, html=html, across=across):
        click.echo(line, color=None if is_colour_allowed() else False)


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


def _query_job_end(shares: Sequence[RunRecord]) -> BatchJobState | None:
    """Ask the scheduler how the job of a run ended, if the record of the run has no end, and print the answer."""
    try:
        seen = find_final_state(shares)
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
    answer; then the report says what the record has.
    """
    if parse_array_index(job, word) == "":
        if page:
            raise no_page_error(job, page)
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
        content: JsonObject = {"job": which.text, "state": seen.description, "code": seen.code}
        text = f"job {which.text} {seen.description}"
        if seen.last_lines:
            content |= {"last_lines": seen.last_lines}
            text += f"; a rank that failed printed last:\n{sanitize_text(seen.last_lines)}"
        if job.code_version:
            content |= {"code_version": as_dict(job.code_version)}
            text += f"\n  code {job.code_version}"
        click.echo(json.dumps(content, indent=2) if as_json else text)
        return 0
    if seen.code is not None and not os.path.exists(seen.log_path or ""):
        raise no_record_error(which, seen)
    if seen.code is not None:
        what = f"job {which.text} {seen.description}; its record is not on this machine"
        raise LaunchError(what, f"its report is at the end of {seen.log_path}")
    there = require_running(job, which)
    if page:
        where = f"its node {there.state.host}" if there.state.host else "its first node"
        raise LaunchError(f"{page}: the record of job {which.text} is on {where}", f"leave {page} out")
    return there.run_command("report", ["--json"] if as_json else [])


def _output_location(run: str, record: RunRecord) -> str | None:
    """Return the line that says where the output of the ranks is; None if there is none."""
    if record.log_dir:
        return f"output: ddplaunch logs {run}, or {sanitize_line(record.log_dir)}"
    return f"output: ddplaunch logs {run}" if rank_logs.rank_log_files(run) else None
