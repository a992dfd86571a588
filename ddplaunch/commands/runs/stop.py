"""``ddplaunch stop``: end a running job from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddplaunch.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from ddplaunch.job.runs import Running
    from ddplaunch.queue.submitted import Submitted

LOOK_EVERY = 1.0  # seconds


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--now", is_flag=True, help="Kill the ranks at once, without the time that --grace gives them.")
def stop(run: str | None, now: bool) -> None:
    """Stop a running job, as Ctrl-C in its terminal does, and wait until it has ended.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID. It may be left out where one job runs. On any
    node of a job with several, all nodes stop. Ctrl-C ends the waiting, and the job still stops.

    A submitted job is meant by its number, and cancelled: its ranks have the time that the site gives.
    """
    from ddplaunch.job import client, runs
    from ddplaunch.queue.meant import job_meant

    if queued := job_meant(run):
        return _cancel(queued, run or "", now)
    job = runs.running(run)
    status = client.show(job.path)
    ranks = len(status.ranks)
    client.stop(job.path, now=now)
    click.echo(f"stopping {status.run_id}: {ranks} rank{'s' * (ranks != 1)}", err=True)
    _await(job)
    click.echo(f"{status.run_id} has ended", err=True)


def _cancel(job: Submitted, word: str, now: bool) -> None:
    """Cancel a submitted job, or all of an array, and wait until it has ended."""
    import time

    from ddplaunch.commands.submit.queue import Slurm
    from ddplaunch.queue.meant import asked, forgotten, index_of, standing
    from ddplaunch.queue.scheduler import JobId, Unanswered
    from ddplaunch.queue.table import scheduler_of

    which = JobId(job.number, job.cluster, index_of(job, word))
    scheduler = scheduler_of(job)
    if now and not isinstance(scheduler, Slurm):
        what = f"--now does not work on job {which.typed}: {scheduler.system} decides when to kill the ranks"
        raise UsageError(what, f"ddplaunch stop {which.typed}")
    if which.index == "":
        asked(scheduler, which.cluster)
    elif (seen := standing(job, which, scheduler)).code is not None:
        raise UsageError(f"job {which.typed} {seen.words}", f"ddplaunch report {which.typed}")
    if now and isinstance(scheduler, Slurm):
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
        if isinstance(error, Unanswered):
            raise
        words = forgotten(job, which.index)  # as PBS does at once, by default
    click.echo(f"job {which.typed} {words}", err=True)


def _await(job: Running) -> None:
    """Wait for the end of its launcher, and say how many ranks are left as that changes."""
    from ddplaunch.job import client
    from ddplaunch.job.client import Unanswered
    from ddplaunch.job.process import ended
    from ddplaunch.job.status import RankState

    said = -1
    while not ended(job.pid, LOOK_EVERY):
        try:
            left = sum(each.state is RankState.RUNNING for each in client.show(job.path, LOOK_EVERY).ranks)
        except Unanswered:
            continue
        if left and left != said:
            click.echo(f"waiting for {left} rank{'s' * (left != 1)}; --now kills what is left", err=True)
            said = left
