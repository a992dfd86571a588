"""``ddplaunch attach``: follow a job that was submitted, from any shell."""

from __future__ import annotations

import re
import shutil

import click

from ddplaunch.cli.run_command import RunName
from ddplaunch.errors import UsageError, shown
from ddplaunch.queue import submitted
from ddplaunch.queue.follower import LogFollower, follow
from ddplaunch.queue.meant import found, one_of, standing
from ddplaunch.queue.scheduler import Forgotten, JobId, SilentScheduler
from ddplaunch.queue.table import scheduler, scheduler_of

LAST = 64 << 10  # bytes of the log that are shown at first


@click.command()
@click.argument("job", required=False, metavar="[JOB]", type=RunName())
def attach(job: str | None) -> int:
    """Follow a job that was submitted, to its end, and return its exit code.

    JOB is its number, NUMBER_INDEX in an array, or its name; without it, the job submitted last. It may be any job of
    Slurm of yours. The last 64 KiB of its log are shown, then what is added. Ctrl-C asks whether to cancel the job or
    detach; without a terminal it detaches.
    """
    known = submitted.find(job) if job is not None else next(iter(submitted.every()), None)
    if known is None:
        if job is None:
            what = "there is no record of a job that you submitted"
            raise UsageError(what, "ddplaunch attach NUMBER takes any job of Slurm")
        return _any_of_slurm(job)
    which = one_of(known, job or known.number, "attach")
    its = scheduler_of(known)
    seen = standing(known, which, its)
    files = (seen.log, seen.errors)
    follower = LogFollower(which, its, files, LAST)
    if seen.code is not None:
        return follower.over(seen)
    return follow(follower, seen.log or known.log, known)


def _any_of_slurm(word: str) -> int:
    """Follow a job that was submitted by something else."""
    if not re.fullmatch(r"\d+(_\d+)?", word):
        raise UsageError(f"no job called {shown(word, 60)} was submitted", "ddplaunch ps shows those that were")
    slurm = scheduler("slurm")
    if shutil.which(slurm.asks) is None:
        what = f"job {word} was not submitted here, and {slurm.asks} is not on PATH to ask Slurm about it"
        raise SilentScheduler(what, "ddplaunch ps shows those that were; on a login node of Slurm any is followed")
    number, _, index = word.partition("_")
    job = JobId(number, index=index or None)
    try:
        found(job, slurm)  # one that does not answer at all is not waited for
    except Forgotten:
        hint = "squeue --me lists your jobs; of those that ended long ago only sacct may know"
        raise UsageError(f"Slurm does not know job {word}, and none was submitted from here", hint) from None
    return follow(LogFollower(job, slurm, last=LAST), f"scontrol show job {word} names it")
