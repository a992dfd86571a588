"""``ddplaunch stop`` and ``wait``: stop a running job from another terminal, or wait for its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import click

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError, host_name, sanitize_line
from ddplaunch.base.text import format_count
from ddplaunch.cli import client
from ddplaunch.cli.client import JobNotResponding
from ddplaunch.cli.lookup import running_jobs
from ddplaunch.cli.lookup.batch_jobs import (
    find_batch_job,
    job_state,
    mark_forgotten,
    parse_array_index,
)
from ddplaunch.cli.lookup.default_run import default_run
from ddplaunch.cli.lookup.job_arrays import query_array
from ddplaunch.cli.lookup.job_command import JobCommand, RunName
from ddplaunch.cli.lookup.remote_jobs import list_remote_jobs
from ddplaunch.cli.lookup.run_index import describe_elsewhere, find_run, find_running
from ddplaunch.cli.lookup.running_jobs import RunningJob, find_record
from ddplaunch.core.control_socket.job_status import RankState
from ddplaunch.core.control_socket.status_request import StatusQuery, StopJobRequest, WaitRequest
from ddplaunch.features.runs.job_wait import wait_for_job
from ddplaunch.observe.history import history_store
from ddplaunch.system.processes.proc_utils import is_suspended, start_ticks, wait_for_end
from ddplaunch.system.schedulers.scheduler import JobId, SchedulerNotResponding
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

T = TypeVar("T")

POLL_INTERVAL_S = 1.0
CONTINUE_TIMEOUT_S = 2.0  # for the kernel to continue a suspended launcher


@click.command(cls=JobCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName(running=True))
@click.option(
    "--all", "every", is_flag=True, help="Stop all your runs on this machine, and those started from it over SSH."
)
@click.option("--now", is_flag=True, help="Kill the ranks immediately, without --grace.")
def stop(run: str | None, every: bool, now: bool) -> int:
    """Stop a run in progress, like Ctrl-C in its terminal, and wait for its end.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. It may be omitted if only one is in
    progress. On any node of a multi-node job, all nodes stop. Ctrl-C ends the wait; the job still stops.

    With the number of a submitted job, cancel that job. Its ranks get the site's kill time.
    """
    if every and run:
        raise UsageError(f"--all is for all runs, not for {sanitize_line(run, 60)}", "leave one of them out")
    if queued := find_batch_job(run):
        _cancel(queued, run or "", now)
        return 0
    jobs = running_jobs.list_running() if every else [find_running(run)]
    far = [job for job in list_remote_jobs() if job.is_running and job.host == host_name()] if every else []
    if not jobs and not far:
        click.echo("you have no runs in progress on this machine", err=True)
    waits, failed = _call_all(partial(_begin_to_stop, job, now) for job in jobs)
    words = ["--now"] if now else []
    waits += [job.start_on_first_host(["stop", job.run_id, *words], stdin=False) for job in far]
    codes, failed_later = _call_all(waits)
    if failed := failed_later or failed:
        raise failed
    return max(codes, default=0)


def _call_all(calls: Iterable[Callable[[], T]]) -> tuple[list[T], LaunchError | None]:
    """Call all functions, also after a LaunchError of one; return the results and the last LaunchError."""
    results, failed = list[T](), None
    for call in calls:
        try:
            results.append(call())
        except LaunchError as error:
            failed = error
    return results, failed


def _begin_to_stop(job: RunningJob, now: bool) -> Callable[[], int]:
    """Request a launcher to stop its job; return a function that waits for its end."""
    if is_suspended(job.pid):
        os.kill(job.pid, signal.SIGCONT)
        click.echo(f"{job.run_id} was suspended: continuing it, so that it can stop", err=True)
        deadline = time.monotonic() + CONTINUE_TIMEOUT_S
        while is_suspended(job.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    status = client.send_request(job.path, StatusQuery())
    client.send_request(job.path, StopJobRequest(now))
    click.echo(f"stopping {status.run_id}: {format_count(len(status.ranks), 'rank')}", err=True)
    return partial(_wait_for_end, job, status.run_id)


def _cancel(job: SubmittedJob, word: str, now: bool) -> None:
    """Cancel a submitted job, or all of an array, and wait until it has ended."""
    which = JobId(job.number, job.cluster, parse_array_index(job, word))
    scheduler = get_scheduler(job)
    if now and not scheduler.can_kill:
        what = f"--now does not work on job {which.text}: {scheduler.title} decides when to kill the ranks"
        raise UsageError(what, f"ddplaunch stop {which.text}")
    if which.index == "":
        words, code, _ = query_array(job)
        if code is not None:
            raise UsageError(f"job {job.number} has ended: {words}", f"ddplaunch report {job.number}")
    elif (seen := job_state(job, which, scheduler)).code is not None:
        raise UsageError(f"job {which.text} {seen.description}", f"ddplaunch report {which.text}")
    if now:
        scheduler.kill(which)
    else:
        scheduler.cancel(which)
    if which.index == "":
        return click.echo(f"stopping all of array {job.number}; ddplaunch ps shows what is left", err=True)
    click.echo(f"stopping job {which.text}", err=True)
    try:
        while (seen := job_state(job, which, scheduler)).code is None:
            time.sleep(POLL_INTERVAL_S)
        words = seen.description
    except LaunchError as error:
        if isinstance(error, SchedulerNotResponding):
            raise
        words = mark_forgotten(job, which.index)  # the scheduler has forgotten the job: PBS does so at once by default
    click.echo(f"job {which.text} {words}", err=True)


def _wait_for_end(job: RunningJob, run_id: str) -> int:
    """Wait for the end of a launcher, and print the number of ranks left whenever it changes; return 0."""
    printed = -1
    while not wait_for_end(job.pid, POLL_INTERVAL_S):
        try:
            ranks = client.send_request(job.path, StatusQuery(), POLL_INTERVAL_S).ranks
        except JobNotResponding:
            continue
        left = sum(each.state is RankState.RUNNING for each in ranks)
        if left and left != printed:
            click.echo(f"waiting for {format_count(left, 'rank')}; --now kills what is left", err=True)
            printed = left
    click.echo(f"{run_id} has ended", err=True)
    return 0


@click.command(cls=JobCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
def wait(run: str | None) -> int:
    """Wait for a run to end and return its exit code.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the newest run of this
    folder. If the run has ended, its exit code is returned immediately.

    With the number of a submitted job, wait for that job; of an array, for all, and return the highest exit code.
    """
    if run and (queued := find_batch_job(run)):
        return wait_for_job(queued, run)
    name, job, record = find_run(default_run(follow=True) if run is None else run)
    code = record.code if record else None
    if job:
        try:
            over = next(client.stream_replies(job.path, WaitRequest()), None)
            code = over.code if over else None
        except JobNotResponding:
            if os.path.exists(job.path):  # else it is about to end, and has closed its control socket
                raise
        wait_for_end(job.pid, None)
        record = find_record(job)
    elif record and code is None:
        if record.host == host_name() and start_ticks(record.pid) == record.born:
            wait_for_end(record.pid, None)
        record = history_store.read_run_record(name)
    if code is None and record:  # the launcher has recorded its end by now
        code = record.code
    is_whole_job = record is not None and record.job == name  # a job of `submit --scheduler local`
    if record and record.job and (code is None or is_whole_job) and (queued := find_batch_job(record.job)):
        return wait_for_job(queued, record.job)
    if code is None:
        hosts = history_store.hosts_elsewhere([record] if record else [])
        why = describe_elsewhere(name, hosts) if hosts else (f"{name} has no exit code: its launcher was killed",)
        error = LaunchError(*why)
        error.exit_code = EXIT_UNAVAILABLE
        raise error
    return code
