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

    from ddplaunch.commands.runs.newest import newest_here
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
            if os.path.exists(job.path):  # else it is about to end, and has closed its door
                raise
        ended(job.pid)
        record = runs.record_of(job)
    elif record and code is None:
        if record.host == os.uname().nodename and born(record.pid) == record.born:
            ended(record.pid)
        record = past.record(name)
    if code is None and record:  # by now it has said how it ended
        code = record.code
    if code is None:
        error = LaunchError(f"{name} has no exit code: its launcher was killed")
        error.exit_code = EXIT_UNAVAILABLE
        raise error
    return code
