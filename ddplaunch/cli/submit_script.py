"""What ``ddplaunch submit`` does alike for Grid Engine, PBS and LSF: refuse, check, show the script, hand it in."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import click

from ddplaunch.cli.batch_command import report, seconds, words_of_run
from ddplaunch.cli.surroundings import TOKEN, check_token
from ddplaunch.cli.typed import current_directory
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.submit.follow import Scheduler
    from ddplaunch.submit.hosts_job import HostsJob
    from ddplaunch.submit.queue import JobId


class Writer(Protocol):
    """The module that writes a scheduler's script."""

    def script(self, job: HostsJob) -> str:
        """Raises UsageError if a value does not fit in one of its lines."""

    def log_path(self, job: HostsJob, number: str) -> str:
        """Where the log of job ``number`` will be."""


class Programs(Protocol):
    """The module that calls a scheduler's programs."""

    CANCELS: str  # the one that cancels a job

    def check_is_here(self, environ: Mapping[str, str]) -> None:
        """Raises UsageError if this machine has not the program that submits."""

    def submit(self, script: str, environ: Mapping[str, str]) -> JobId:
        """Raises UsageError if the scheduler refuses the job."""

    def Scheduler(self, log: str) -> Scheduler:
        """What a follower asks about a job with that log."""


def refused(program: str) -> dict[str, str]:
    """What no scheduler but Slurm has, where ``program`` submits: click's names, and what to type instead."""
    return {
        "error": "stderr is in the log",
        "array": "submit one job for each index",
        **dict.fromkeys(("sbatch_args", "srun_args"), f"--{program}-arg is for options of {program}"),
        **dict.fromkeys(("teardown", "requeue"), "it needs Slurm"),
        "spares": "it needs Slurm, which lets a job go on without a lost node",
        **dict.fromkeys(("container_image", "container_mounts"), "it needs Slurm's srun"),
    }


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


def hosts_job(ctx: click.Context, job_name: str, more: str) -> HostsJob:
    """Read the options that are left into a job. ``more`` is click's name of what passes options on."""
    from ddplaunch.cli.submit import setups
    from ddplaunch.submit.hosts_job import HostsJob

    values = ctx.params
    return HostsJob(
        command=words_of_run(ctx),
        interpreter=sys.executable,
        chdir=current_directory(),
        job_name=job_name,
        output=values["output"],
        nodes=values["nodes"],
        cpus_per_task=values["cpus_per_task"],
        gpus_per_node=values["gpus_per_node"],
        mem=values["mem"],
        seconds=seconds(values["time"]) if values["time"] else None,
        partition=values["partition"],
        account=values["account"],
        exclusive=values["exclusive"],
        pe=values["pe"],
        more=values[more],
        setup=tuple(setups(ctx, "setup")),
    )


def hand_in(ctx: click.Context, target: str, job: HostsJob, writer: Writer, programs: Programs, *, shows: str) -> int:
    """Print the script, or hand it in; with --follow show the log, and return the job's exit code.

    ``shows`` says who sees the variables of a job, and how.
    """
    from ddplaunch.cli.following import follow as follow_to_its_end
    from ddplaunch.cli.following import say
    from ddplaunch.cli.submit import keep, prepare_log
    from ddplaunch.submit.follow import Follower

    dry_run: bool = ctx.params["dry_run"]
    script = writer.script(job)
    check_token(None)
    otherwise = {"job-name": "the target", "output": "default", "nodes": "default", "scheduler": "default"}
    typed = {name: ctx.params[name] for name in ("scheduler", "time", "qsub_args", "bsub_args")}
    output = job.output or os.path.basename(writer.log_path(job, "NUMBER"))
    more = (f"chdir: {job.chdir} (the current directory)", f"interpreter: {job.interpreter} (this one)")
    notes = [f"{TOKEN} is not secret in this job: {shows}"] if TOKEN in os.environ else []
    report(ctx, {**vars(job), **typed, "output": output}, otherwise, notes, {}, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)
        return 0
    programs.check_is_here(os.environ)
    prepare_log(job.chdir, "--output", output)
    submitted = programs.submit(script, os.environ)
    log = writer.log_path(job, submitted.number)
    lines = [f"job {submitted.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}", f"log: {log}"]
    follow, stop = f"tail -n +1 -F {shlex.quote(log)}", f"{programs.CANCELS} {submitted.number}"
    if not ctx.params["no_history"]:
        keep(ctx, job, submitted, target, log)
        follow, stop = f"ddplaunch attach {submitted.number}", f"ddplaunch stop {submitted.number}"
    if not ctx.params["follow"]:
        click.echo(os.fsencode("\n".join([*lines, f"follow: {follow}", f"cancel: {stop}"])))
        return 0
    for line in (*lines, f"cancel: {stop}"):
        say(line)
    follower = Follower(submitted, programs.Scheduler(log), sys.stdout.buffer, sys.stderr.buffer, say)
    return follow_to_its_end(submitted, log, follower)
