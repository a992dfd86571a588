"""``ddplaunch ps``: lists this user's jobs on this machine, submitted batch jobs, and recently ended runs."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import click

from ddplaunch.base.errors import host_name
from ddplaunch.base.text import format_count, format_elapsed, join_names
from ddplaunch.base.tty import window_size
from ddplaunch.base.types import as_dict
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding, advice_to_continue
from ddplaunch.cli.console_output import is_colour_allowed
from ddplaunch.cli.lookup.queued_jobs import MAX_RECENT, RECENT_S, QueuedJob, list_queued_jobs
from ddplaunch.cli.lookup.remote_jobs import RemoteJob, list_remote_jobs, update_remote_jobs
from ddplaunch.cli.lookup.run_index import describe_unreachable, index_runs
from ddplaunch.cli.lookup.running_jobs import RunningJob
from ddplaunch.cli.text_table import fit_to_width, format_table, short_target
from ddplaunch.core.control_socket.job_status import Status
from ddplaunch.features.runs.goodput import format_percent
from ddplaunch.observe.diagnosis.inspection import ProgramInspection
from ddplaunch.observe.diagnosis.rank_position import format_exit
from ddplaunch.observe.history import history_store
from ddplaunch.observe.history.run_record import RunRecord, RunState, is_skipped_lines_note
from ddplaunch.observe.request import InspectJobRequest, JobInspection
from ddplaunch.system.processes.proc_utils import is_suspended

RATE_INTERVAL_S = 0.5  # between the two inspections for the rate
REPLY_TIMEOUT_S = 2.0  # for a launcher: it may be suspended
DEFAULT_GROUP = "0"
MAX_TARGET = 60  # columns

_COLOURS = {RunState.DONE: "green", RunState.FAILED: "red", RunState.LOST: "red"}


@click.command()
@click.option("-a", "--all", "show_all", is_flag=True, help="Show all recorded runs, not only the latest.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with stable field names.")
def ps(show_all: bool, as_json: bool) -> None:
    """List your runs: in progress on this machine, submitted, and recently ended.

    COLLECTIVES/S is the progress of a run: collectives per second of the lowest local rank in its default process
    group, measured over half a second. Ended runs are recorded in your home, except with `run --no-history`.
    """
    runs = index_runs().jobs
    seen = inspect_all({run: job for run, job in runs.items() if job})
    now = time.time()
    records = read_records([run for run, job in runs.items() if not job], now, everything=show_all)
    unreadable = [run for run, record in records.items() if record is None]
    over = (each for each in records.values() if each and each.fate is not RunState.RUNNING)
    recent = (each for each in over if show_all or now - each.last_seen < RECENT_S)
    ended = list(itertools.islice(recent, None if show_all else MAX_RECENT))
    jobs = list_queued_jobs(now, everything=show_all)
    far = list_remote_jobs()
    remote = [job for job in far if show_all or job.is_running or now - (job.ended or job.began) < RECENT_S]
    remote = update_remote_jobs(remote)
    running = seen()
    if unreadable and show_all:
        which = f"{format_count(len(unreadable), 'record')} cannot be read: {join_names(unreadable)}"
        click.echo(f"{which}; ddplaunch clean {unreadable[0]} removes one", err=True)
    damaged = [run for run, record in records.items() if record and any(map(is_skipped_lines_note, record.notes))]
    if damaged and show_all:
        which = "a record" if len(damaged) == 1 else f"{len(damaged)} records"
        click.echo(f"lines of {which} cannot be read, and are left out: {join_names(damaged)}", err=True)
    if as_json:
        found = [*map(running_job_to_json, running), *map(remote_job_to_json, remote)]
        found += [*map(submitted_job_to_json, jobs), *map(ended_run_to_json, ended)]
        return click.echo(json.dumps(found, indent=2))
    if not running and not ended and not jobs and not remote:
        hint = "" if show_all or not runs else "; --all shows those that have ended"
        click.echo(f"you have no runs in progress on this machine{hint}", err=True)
    across = window_size(1)[0] if os.isatty(1) else None
    for line in render_table(running, remote, jobs, ended, now, across):
        click.echo(line, color=None if is_colour_allowed() else False)
    for each in running:
        if each.suspended:
            pid = each.job.pid
            click.echo(f"run {each.run} is suspended (PID {pid}): {advice_to_continue(pid)}", err=True)
    for record in records.values():
        if record and record.fate is RunState.RUNNING and record.host == host_name():
            click.echo(f"{describe_unreachable(record.run, record.pid)}: kill {record.pid} stops it", err=True)
    listed = {*(job.run_id for job in far), *(each.job.number for each in jobs)}
    others = (each for each in records.values() if each and (show_all or now - each.last_seen < RECENT_S))
    elsewhere = [
        f"{each.run} ({host}, seen {format_elapsed(now - each.last_seen)} ago)"
        for each in others
        if listed.isdisjoint((each.run_id, (each.job or "").partition("_")[0]))
        for host in history_store.hosts_elsewhere([each])
    ]
    if elsewhere:
        click.echo(f"{format_count(len(elsewhere), 'run')} on other hosts: {join_names(elsewhere)}", err=True)


def read_records(runs: Sequence[str], now: float, *, everything: bool) -> dict[str, RunRecord | None]:
    """Read the records of the runs to list, the latest first; ``everything``: read those of all runs.

    Not listed are runs that ended long ago, and of those that ended lately all but the latest ``MAX_RECENT``.
    """
    over = {each.name: each.changed_at for each in history_store.list_folders() if each.is_over}
    records: dict[str, RunRecord | None] = {}
    listed = 0
    for run in runs:
        if run in over and not everything and (listed == MAX_RECENT or over[run] < now - RECENT_S):
            continue
        records[run] = record = history_store.read_run_record(run)
        listed += run in over and record is not None
    return records


class ObservedJob(NamedTuple):
    """A running job and its status."""

    run: str
    job: RunningJob
    status: Status | None  # None if its launcher does not reply
    rate: float | None  # collectives per second; None if unknown
    programs: tuple[ProgramInspection, ...] = ()  # beside the ranks
    suspended: bool = False  # whether its launcher was stopped by a signal

    @property
    def state(self) -> str:
        return self.status.state.value if self.status else "suspended" if self.suspended else "silent"


def inspect_all(jobs: Mapping[str, RunningJob]) -> Callable[[], list[ObservedJob]]:
    """Start to inspect all of these jobs at once, twice each; return a function that waits for the replies.

    The caller does other work meanwhile.
    """
    found: dict[str, dict[int, JobInspection]] = {run: {} for run in jobs}

    def inspect(run: str, job: RunningJob, number: int) -> None:
        with suppress(JobNotResponding):
            time.sleep(RATE_INTERVAL_S * number)
            found[run][number] = client.send_request(job.path, InspectJobRequest(), REPLY_TIMEOUT_S)

    threads = [
        threading.Thread(target=inspect, args=(run, job, number), daemon=True)
        for run, job in jobs.items()
        for number in range(2)
    ]
    for thread in threads:
        thread.start()

    def wait_for_replies() -> list[ObservedJob]:
        for thread in threads:
            thread.join()
        return [_make_observed_job(run, job, found[run].get(0), found[run].get(1)) for run, job in jobs.items()]

    return wait_for_replies


def _make_observed_job(
    run: str, job: RunningJob, first: JobInspection | None, second: JobInspection | None
) -> ObservedJob:
    last = second or first
    now = collectives_per_second(first, second) if first and second else None
    programs = last.inspection.programs if last else ()
    status = last.status if last else None
    return ObservedJob(run, job, status, now, programs, suspended=not last and is_suspended(job.pid))


def collectives_per_second(first: JobInspection, second: JobInspection) -> float | None:
    """Compute collectives per second in the default process group, of the lowest rank in both inspections."""
    seconds = second.inspection.moment - first.inspection.moment
    before, after = _count_collectives(first), _count_collectives(second)
    both = sorted(before.keys() & after.keys())
    if first.status.attempt != second.status.attempt or not both or seconds <= 0:
        return None
    return max(0.0, (after[both[0]] - before[both[0]]) / seconds)


def _count_collectives(found: JobInspection) -> dict[int, int]:
    return {
        rank.rank: group.enqueued  # gloo's count of completed ones comes late and out of order
        for rank in found.inspection.ranks
        for group in rank.groups
        if group.group == DEFAULT_GROUP
    }


def render_table(
    running: Sequence[ObservedJob],
    remote: Sequence[RemoteJob],
    jobs: Sequence[QueuedJob],
    ended: Sequence[RunRecord],
    now: float,
    across: int | None,
) -> Iterator[str]:
    """Yield the lines of ``ddplaunch ps``, with ANSI styles; ``across``: columns of the terminal."""
    rows = [row for each in running for row in (_running_row(each, now), *_program_rows(each, now))]
    heads = ["RUN", "STATE", "AGE", "RANKS", "COLLECTIVES/S", "PID", "TARGET"]
    tables = [(rows, format_table(heads, rows, (), across, ("PID", "COLLECTIVES/S")))]
    rows = [_ssh_row(each, now) for each in remote]
    tables += [(rows, format_table(["RUN", "STATE", "BEGAN", "HOSTS", "TARGET"], rows, (), across))]
    rows = [_job_row(each, now) for each in jobs]
    heads = ["JOB", "SUBMITTED", "NODES", "RANKS", "COLLECTIVES/S", "TARGET", "STATE"]
    tables += [(rows, format_table(heads, rows, (), across, ("COLLECTIVES/S", "SUBMITTED")))]
    rows, colours = [_ended_row(each, now) for each in ended], [_COLOURS.get(each.fate) for each in ended]
    heads = ["RUN", "STATE", "ENDED", "LASTED", "GOODPUT", "RANKS", "TARGET"]
    tables += [(rows, format_table(heads, rows, colours, across, ("GOODPUT", "LASTED")))]
    for number, lines in enumerate(lines for rows, lines in tables if rows):
        yield from ("", *lines) if number else lines


def _running_row(seen: ObservedJob, now: float) -> tuple[str, ...]:
    known = seen.status or history_store.read_run_record(seen.run)
    if known is None:
        return seen.run, seen.state, "-", "-", "-", str(seen.job.pid), "its launcher does not answer"
    age, ranks = format_elapsed(now - known.began), str(known.world_size)
    return seen.run, seen.state, age, ranks, _format_rate(seen.rate), str(seen.job.pid), _format_target(known.target)


def _program_rows(seen: ObservedJob, now: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each program beside the ranks, with its place instead of a target."""
    for each in seen.programs:
        state = f"{each.state} ({format_exit(each.code)})" if each.code is not None else each.state
        age, pid = format_elapsed(max(0.0, now - each.since)), str(each.pid) if each.is_running else "-"
        yield f"  {each.program}", state, age, "-", "-", pid, each.place or each.kind


def _format_target(text: str) -> str:
    return fit_to_width(short_target(text), MAX_TARGET)


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _job_row(queued: QueuedJob, now: float) -> tuple[str, ...]:
    job = queued.job
    ranks = "-" if queued.world_size is None else str(queued.world_size)
    since, words = f"{format_elapsed(now - job.moment)} ago", queued.description.removeprefix("is ")
    return job.number, since, str(job.nodes), ranks, _format_rate(queued.rate), _format_target(job.target), words


def _ssh_row(job: RemoteJob, now: float) -> tuple[str, ...]:
    began = f"{format_elapsed(now - job.began)} ago"
    return job.run_id, job.description, began, join_names(job.hosts), _format_target(job.target)


def _ended_row(record: RunRecord, now: float) -> tuple[str, ...]:
    lasted = "-" if record.ended is None else format_elapsed(record.ended - record.began)
    since = "-" if record.ended is None else f"{format_elapsed(now - record.ended)} ago"
    times = since, lasted, format_percent(record.spent.goodput if record.ended else None)
    return record.run, format_state(record), *times, str(record.world_size), _format_target(record.target)


def format_state(record: RunRecord) -> str:
    """Format the state of a run: "done", "failed (1)"."""
    return f"{record.fate.value} ({record.code})" if record.fate is RunState.FAILED else record.fate.value


_FIELDS: dict[str, object] = dict.fromkeys([
    *("run", "state", "pid", "node_rank", "world_size", "ranks", "attempt", "restarts"),
    *("began", "ended", "code", "collectives_per_second", "effective", "target", "hosts", "programs"),
])  # fmt: skip
"""The fields of each entry of ``ps --json``, null where unknown."""


def running_job_to_json(seen: ObservedJob) -> dict[str, object]:
    """Build the entry of a running job for ``ps --json``."""
    entry = {**_FIELDS, "run": seen.run, "pid": seen.job.pid, "ranks": [], "collectives_per_second": seen.rate}
    entry |= {"state": seen.state if seen.suspended else None}
    if not seen.status and (record := history_store.read_run_record(seen.run)):
        entry |= {"node_rank": record.node_rank, "world_size": record.world_size}
        entry |= {"began": record.began, "target": record.target}
    if status := seen.status:
        entry |= {"state": status.state.value, "node_rank": status.node_rank, "world_size": status.world_size}
        entry |= {"ranks": [each.rank for each in status.ranks], "attempt": status.attempt}
        entry |= {"restarts": status.restarts, "began": status.began, "target": status.target}
        entry |= {"programs": [as_dict(each) for each in seen.programs]}
    return entry


def remote_job_to_json(job: RemoteJob) -> dict[str, object]:
    """Build the entry of a job on other machines for ``ps --json``."""
    fields = {**_FIELDS, "run": job.run_id, "state": job.state, "pid": job.pid or None, "ranks": [], "hosts": job.hosts}
    return {**fields, "began": job.began, "ended": job.ended, "code": job.code, "target": job.target}


def submitted_job_to_json(job: QueuedJob) -> dict[str, object]:
    """Build the entry of a submitted job for ``ps --json``."""
    entry = {**_FIELDS, "run": job.job.number, "state": job.description, "world_size": job.world_size, "ranks": []}
    entry |= {"began": job.job.moment, "code": job.code, "collectives_per_second": job.rate}
    return {**entry, "target": job.job.target}


def ended_run_to_json(record: RunRecord) -> dict[str, object]:
    """Build the entry of a run that has ended for ``ps --json``."""
    last = record.attempts[-1] if record.attempts else None
    entry = {**_FIELDS, "run": record.run, "state": record.fate.value, "pid": record.pid}
    entry |= {"node_rank": record.node_rank, "world_size": record.world_size}
    entry |= {"ranks": [each.rank for each in last.ranks] if last else [], "attempt": last.number if last else -1}
    entry |= {"restarts": last.number if last else 0, "began": record.began, "ended": record.ended}
    entry |= {"effective": record.spent.goodput if record.ended else None}
    return {**entry, "code": record.code, "target": record.target}
