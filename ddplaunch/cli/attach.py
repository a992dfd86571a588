"""``ddplaunch attach``: follow a job that was submitted, from any shell."""

from __future__ import annotations

import click

LAST = 64 << 10  # bytes of the log that are shown at first


@click.command()
@click.argument("job", required=False, metavar="[JOB]")
def attach(job: str | None) -> int:
    """Follow a job that was submitted, to its end, and return its exit code.

    JOB is its number, NUMBER_INDEX in an array, or its name; without it, the job submitted last. It may be any job of
    Slurm of yours. The last 64 KiB of its log are shown, then what is added. Ctrl-C asks whether to cancel the job or
    detach; without a terminal it detaches.
    """
    import re
    import shutil
    import sys

    from ddplaunch.cli.following import follow, say
    from ddplaunch.cli.queued import Unanswered, found, one_of, standing
    from ddplaunch.errors import UsageError, shown
    from ddplaunch.job import submitted
    from ddplaunch.submit import queue
    from ddplaunch.submit.follow import Follower
    from ddplaunch.submit.queue import JobId
    from ddplaunch.submit.schedulers import scheduler_of

    out, err = sys.stdout.buffer, sys.stderr.buffer
    known = submitted.find(job) if job is not None else next(iter(submitted.every()), None)
    if known is None:
        if job is None:
            raise UsageError(
                "there is no record of a job that you submitted", "ddplaunch attach NUMBER takes any job of Slurm"
            )
        if not re.fullmatch(r"\d+(_\d+)?", job):
            raise UsageError(f"no job called {shown(job, 60)} was submitted", "ddplaunch ps shows those that were")
        if shutil.which(queue.asked) is None:
            what = f"job {job} was not submitted here, and scontrol is not on PATH to ask Slurm about it"
            raise Unanswered(what, "ddplaunch ps shows those that were; on a login node of Slurm any is followed")
        found(JobId(job), queue, "Slurm")  # one that does not answer at all is not waited for
        follower = Follower(JobId(job), queue, out, err, say, last=LAST)
        return follow(JobId(job), f"scontrol show job {job} names it", follower)
    which = one_of(known, job or known.number, "attach")
    scheduler = scheduler_of(known)
    seen = standing(known, which, scheduler)
    log = seen.log or known.log
    follower = Follower(which, scheduler, out, err, say, log=log, last=LAST)
    if seen.code is not None:
        return follower.over(seen)
    code = follow(which, log, follower)
    last = follower.last_seen
    if last and last.code is not None and not known.array:
        submitted.over(known, last.words, last.code)
    return code
