"""``ddplaunch stop`` and ``wait``: end a running job from another terminal, or wait for its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import click

from ddplaunch.cli.on_host import CommandOnHost, HostCommand
from ddplaunch.cli.run_command import RunName
from ddplaunch.commands.runs.newest import newest_here
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError, host_name, shown
from ddplaunch.job import client, over_ssh, past, runs
from ddplaunch.job.client import NoAnswer
from ddplaunch.job.requests.status import AskStatus, StopJob, WaitForEnd
from ddplaunch.job.runs import RunningJob
from ddplaunch.job.status import RankState
from ddplaunch.queue.meant import asked, forgotten, index_of, job_meant, standing
from ddplaunch.queue.scheduler import JobId, SilentScheduler
from ddplaunch.queue.submitted import Submitted
from ddplaunch.queue.table import scheduler_of
from ddplaunch.rank.processes import is_suspended, start_ticks, wait_for_end
from ddplaunch.words import counted

LOOK_EVERY = 1.0  # seconds
CONTINUE_TIMEOUT = 2.0  # seconds for the kernel to continue a suspended launcher


@click.command(cls=HostCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName(running=True))
@click.option(
    "--all", "every", is_flag=True, help="Stop all your jobs that run on this machine, or were started on it by SSH."
)
@click.option("--now", is_flag=True, help="Kill the ranks at once, without the time that --grace gives them.")
def stop(run: str | None, every: bool, now: bool) -> int:
    """Stop a running job, as Ctrl-C in its terminal does, and wait until it has ended.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID. It may be left out where one job runs. On any
    node of a job with several, all nodes stop. Ctrl-C ends the waiting, and the job still stops.

    A submitted job is meant by its number, and cancelled: its ranks have the time that the site gives.
    """
    if every and run:
        raise UsageError(f"--all is for all jobs, not for {shown(run, 60)}", "leave one of them out")
    if queued := job_meant(run):
        _cancel(queued, run or "", now)
        return 0
    jobs = runs.all_running() if every else [runs.running(run)]
    far = [job for job in over_ssh.elsewhere() if job.runs and job.host == host_name()] if every else []
    if not jobs and not far:
        click.echo("no job of yours is running here", err=True)
    ending = [(job, _begin_to_stop(job, now)) for job in jobs]
    on_hosts = [CommandOnHost(job, ["stop", job.run_id, *(["--now"] if now else [])], stdin=False) for job in far]
    for job, run_id in ending:
        _await(job)
        click.echo(f"{run_id} has ended", err=True)
    return _end_of_all(on_hosts)


def _end_of_all(commands: Sequence[CommandOnHost]) -> int:
    """Wait for all of them, and return the highest exit code. Raises the LaunchError of the last that failed."""
    codes, failed = [0], None
    for each in commands:
        try:
            codes.append(each.wait())
        except LaunchError as error:
            failed = error
    if failed:
        raise failed
    return max(codes)


def _begin_to_stop(job: RunningJob, now: bool) -> str:
    """Have a launcher stop its job; return the job's run id."""
    if is_suspended(job.pid):
        os.kill(job.pid, signal.SIGCONT)
        click.echo(f"{job.run_id} was suspended; it is continued, so that it can stop", err=True)
        _until_it_runs(job.pid)
    status = client.ask(job.path, AskStatus())
    client.ask(job.path, StopJob(now))
    click.echo(f"stopping {status.run_id}: {counted(len(status.ranks), 'rank')}", err=True)
    return status.run_id


def _until_it_runs(pid: int) -> None:
    """Wait until the kernel has continued a process."""
    deadline = time.monotonic() + CONTINUE_TIMEOUT
    while is_suspended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def _cancel(job: Submitted, word: str, now: bool) -> None:
    """Cancel a submitted job, or all of an array, and wait until it has ended."""
    which = JobId(job.number, job.cluster, index_of(job, word))
    scheduler = scheduler_of(job)
    if now and not scheduler.kills:
        what = f"--now does not work on job {which.typed}: {scheduler.system} decides when to kill the ranks"
        raise UsageError(what, f"ddplaunch stop {which.typed}")
    if which.index == "":
        asked(scheduler, which.cluster)
    elif (seen := standing(job, which, scheduler)).code is not None:
        raise UsageError(f"job {which.typed} {seen.words}", f"ddplaunch report {which.typed}")
    if now:
        scheduler.kill(which)
    else:
        scheduler.cancel(which)
    if which.index == "":
        return click.echo(f"stopping all of array {job.number}; ddplaunch ps shows what is left", err=True)
    click.echo(f"stopping job {which.typed}", err=True)
    try:
        while (seen := standing(job, which, scheduler)).code is None:
            time.sleep(LOOK_EVERY)
        words = seen.words
    except LaunchError as error:
        if isinstance(error, SilentScheduler):
            raise
        words = forgotten(job, which.index)  # as PBS does at once, by default
    click.echo(f"job {which.typed} {words}", err=True)


def _await(job: RunningJob) -> None:
    """Wait for the end of its launcher, and say how many ranks are left as that changes."""
    said = -1
    while not wait_for_end(job.pid, LOOK_EVERY):
        try:
            left = sum(each.state is RankState.RUNNING for each in client.ask(job.path, AskStatus(), LOOK_EVERY).ranks)
        except NoAnswer:
            continue
        if left and left != said:
            click.echo(f"waiting for {counted(left, 'rank')}; --now kills what is left", err=True)
            said = left


@click.command(cls=HostCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
def wait(run: str | None) -> int:
    """Wait for the end of a job, and return its exit code.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the newest run of this folder. For
    a run that has ended, its exit code is returned at once.
    """
    name, job, record = runs.find(newest_here(follow=True) if run is None else run)
    code = record.code if record else None
    if job:
        try:
            over = next(client.stream(job.path, WaitForEnd()), None)
            code = over.code if over else None
        except NoAnswer:
            if os.path.exists(job.path):  # else it is about to end, and has closed its door
                raise
        wait_for_end(job.pid, None)
        record = runs.record_of(job)
    elif record and code is None:
        if record.host == host_name() and start_ticks(record.pid) == record.born:
            wait_for_end(record.pid, None)
        record = past.record(name)
    if code is None and record:  # by now it has said how it ended
        code = record.code
    if code is None:
        error = LaunchError(f"{name} has no exit code: its launcher was killed")
        error.exit_code = EXIT_UNAVAILABLE
        raise error
    return code
