"""What ``ddplaunch submit`` does alike for Grid Engine, PBS and LSF: refuse, check, show the script, hand it in."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import click

from ddplaunch.cli.batch_command import report
from ddplaunch.cli.surroundings import TOKEN, check_token
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.submit.follow import Scheduler
    from ddplaunch.submit.gridengine import GridJob
    from ddplaunch.submit.hosts_job import HostsJob
    from ddplaunch.submit.queue import JobId


class Programs(Protocol):
    """The module that calls a scheduler's programs."""

    def check_is_here(self, environ: Mapping[str, str]) -> None:
        """Raises UsageError if this machine has not the program that submits."""

    def submit(self, script: str, environ: Mapping[str, str]) -> JobId:
        """Raises UsageError if the scheduler refuses the job."""


def refuse(ctx: click.Context, refused: Mapping[str, str]) -> None:
    """Raise UsageError for options that the scheduler has not: click's names, and what to type instead."""
    for name, hint in refused.items():
        if ctx.params[name]:
            option = next(param.opts[0] for param in ctx.command.params if param.name == name)
            raise UsageError(f"{option} does not work with --scheduler {ctx.params['scheduler']}", hint)


def check_passed_on(option: str, texts: Iterable[str], example: str, ours_alone: Collection[str], hint: str) -> None:
    """Check what --qsub-arg or --bsub-arg passes on. Raises UsageError for what is not an option, or set by us."""
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError:
            raise UsageError(f"{option} {text}: a quotation mark is missing") from None
        if not words or not words[0].startswith("-"):
            program = option.removeprefix("--").removesuffix("-arg")
            raise UsageError(f"{option} {text}: expected an option of {program}", f"{option}='{example}'")
        if words[0] in ours_alone:
            raise UsageError(f"{option} {text}: ddplaunch sets {words[0]} itself", hint)


def hand_in(
    ctx: click.Context,
    target: str,
    job: GridJob | HostsJob,
    script: str,
    programs: Programs,
    ask: Callable[[str], Scheduler],
    log_path: Callable[[str], str],
    *,
    shows: str,
    cancel: str,
) -> int:
    """Print the script, or hand it in; with --follow show the log, and return the job's exit code.

    Args:
        ask: makes what a follower asks, of the log's path. log_path: the log of a job, by its number.
        shows: who sees the variables of a job, and how. cancel: the program that cancels a job.
    """
    from ddplaunch.cli.following import follow as follow_to_its_end
    from ddplaunch.cli.following import say
    from ddplaunch.cli.submit import prepare_log
    from ddplaunch.submit.follow import Follower

    dry_run: bool = ctx.params["dry_run"]
    check_token(None)
    otherwise = {"job-name": "the target", "output": "default", "nodes": "default", "scheduler": "default"}
    values = {**vars(job), "scheduler": ctx.params["scheduler"], "time": ctx.params["time"]}
    values["output"] = output = job.output or os.path.basename(log_path("NUMBER"))
    more = (f"chdir: {job.chdir} (the current directory)", f"interpreter: {job.interpreter} (this one)")
    notes = [f"{TOKEN} is no secret in this job: {shows}"] if TOKEN in os.environ else []
    report(ctx, values, otherwise, notes, {}, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)
        return 0
    programs.check_is_here(os.environ)
    prepare_log(job.chdir, "--output", output)
    submitted = programs.submit(script, os.environ)
    log = log_path(submitted.number)
    lines = [f"job {submitted.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}", f"log: {log}"]
    stop = f"cancel: {cancel} {submitted.number}"
    if not ctx.params["follow"]:
        click.echo(os.fsencode("\n".join([*lines, f"follow: tail -n +1 -F {shlex.quote(log)}", stop])))
        return 0
    for line in (*lines, stop):
        say(line)
    follower = Follower(submitted, ask(log), sys.stdout.buffer, sys.stderr.buffer, say)
    return follow_to_its_end(submitted, log, follower)
