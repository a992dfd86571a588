"""Following a submitted job in a terminal, to its end; Ctrl-C asks what to do with the job."""

from __future__ import annotations

import sys

import click

from ddplaunch.errors import EXIT_SIGNAL
from ddplaunch.queue.follower import Follower
from ddplaunch.queue.meant import keep_end
from ddplaunch.queue.scheduler import JobId
from ddplaunch.queue.submitted import Submitted


def follow(job: JobId, log: str, follower: Follower, kept: Submitted | None = None) -> int:
    """Follow the job to its end and return its exit code; 130 where Ctrl-C leaves it running.

    Its end goes into the record that is ``kept`` of it.
    """
    while True:
        try:
            code = follower.run()
            if kept:
                keep_end(kept, job, follower.last_seen)
            return code
        except KeyboardInterrupt:
            answer = _ask(job)
            code = EXIT_SIGNAL + 2
        except BrokenPipeError:  # `| head` has read enough
            answer = "d"
            code = EXIT_SIGNAL + 13
        if answer == "c":
            follower.scheduler.cancel(job)
        elif answer == "d":
            say(f"job {job.typed} keeps running; its log: {log}")
            return code


def say(line: str) -> None:
    """Print a line of ours on stderr."""
    click.echo(f"ddplaunch: {line}", err=True)


def _ask(job: JobId) -> str:
    """Ask what to do with the job: "c" is to cancel it, "d" to detach, anything else to follow on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "d"
    question = f"\nddplaunch: job {job.typed}: [c]ancel it, [d]etach and let it run, or [f]ollow on? "
    click.echo(question, err=True, nl=False)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer:  # Ctrl-C again, or Ctrl-D
        click.echo(err=True)
        return "d"
    return answer.strip().lower()[:1]
