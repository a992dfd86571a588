"""``ddplaunch wait``: until a job has ended, for scripts."""

from __future__ import annotations

import click


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
def wait(run: str | None) -> int:
    """Wait for the end of a job, and return its exit code.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the newest run of this folder. For
    a run that has ended, its exit code is returned at once.
    """
    import os

    from ddplaunch.cli.newest import newest_here
    from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
    from ddplaunch.job import client, past, runs
    from ddplaunch.job.client import Unanswered
    from ddplaunch.job.process import born, ended

    name, job, record = runs.find(run or newest_here(follow=True))
    code = record.code if record else None
    if job:
        try:
            code = client.wait(job.path)
        except Unanswered:
            if not ended(job.pid, 0):
                raise
        ended(job.pid)
    elif record and code is None and record.host == os.uname().nodename and born(record.pid) == record.born:
        ended(record.pid)  # it is about to, and has closed its door
    if code is None and (record := past.record(name)):  # it ended before we could ask
        code = record.code
    if code is None:
        error = LaunchError(f"{name} has no exit code: its launcher was killed")
        error.exit_code = EXIT_UNAVAILABLE
        raise error
    return code
