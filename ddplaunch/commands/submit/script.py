"""What ``ddplaunch submit`` does alike for Grid Engine, PBS and LSF: refuse, check, show the script, hand it in."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import click

from ddplaunch.cli.batch_command import given as typed_on
from ddplaunch.cli.batch_command import report, seconds, words_of_run
from ddplaunch.cli.options import Source
from ddplaunch.cli.run_command import source_of
from ddplaunch.cli.surroundings import TOKEN, check_token
from ddplaunch.cli.typed import current_directory
from ddplaunch.dataclass import replace
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.commands.submit.hosts_job import HostsJob
    from ddplaunch.commands.submit.slurm import BatchJob, Requeue, Setup
    from ddplaunch.queue.scheduler import JobId, Scheduler
    from ddplaunch.queue.submitted import Submitted


class Writer(Protocol):
    """The module that writes a scheduler's script."""

    def script(self, job: HostsJob) -> str:
        """Raises UsageError if a value does not fit in one of its lines."""

    def log_path(self, job: HostsJob, number: str) -> str:
        """Where the log of job ``number`` will be."""


def refused(program: str) -> dict[str, str]:
    """What no scheduler but Slurm has, where ``program`` submits: click's names, and what to type instead."""
    return {
        "error": "stderr is in the log",
        **dict.fromkeys(("sbatch_args", "srun_args"), f"--{program}-arg is for options of {program}"),
        "teardown": "it needs Slurm",
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


def check_array(ctx: click.Context, *, first: int = 1, lists: bool = False, alone: bool = True) -> None:
    """Check --array: from which index on, whether it may be a list, or one index alone."""
    array, scheduler = ctx.params["array"], ctx.params["scheduler"]
    if array is None:
        return
    indices = array.partition("%")[0]
    if "," in indices and not lists:
        raise UsageError(f"--array {array}: --scheduler {scheduler} takes one range", "--array 1-4, or --array 1-9:2")
    if min(int(part.partition("-")[0] or 0) for part in indices.split(",")) < first:
        raise UsageError(f"--array {array}: indices begin with {first} here", "--array 1-4")
    if not alone and "-" not in indices:
        raise UsageError(f"--array {array}: expected a range of two or more", "--array 1-4, or leave it out")


def hosts_job(ctx: click.Context, job_name: str, more: str) -> HostsJob:
    """Read the options that are left into a job. ``more`` is click's name of what passes options on."""
    from ddplaunch.commands.submit.hosts_job import HostsJob

    values = ctx.params
    return HostsJob(
        command=words_of_run(ctx),
        interpreter=sys.executable,
        chdir=current_directory(),
        job_name=job_name,
        output=values["output"],
        nodes=values["nodes"] + values["spares"],
        spares=values["spares"],
        array=values["array"],
        requeue=requeue(ctx) if values["requeue"] else None,
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


def hand_in(ctx: click.Context, target: str, job: HostsJob, writer: Writer, scheduler: Scheduler, *, shows: str) -> int:
    """Print the script, or hand it in; with --follow show the log, and return the job's exit code.

    ``shows`` says who sees the variables of a job, and how.
    """
    from ddplaunch.queue.scheduler import check_on_path

    dry_run: bool = ctx.params["dry_run"]
    check_follow(ctx)
    script = writer.script(job)
    check_token(None)
    otherwise = {"job-name": "the target", "output": "default", "nodes": "default", "scheduler": "default"}
    typed = {name: ctx.params[name] for name in ("scheduler", "time", "qsub_args", "bsub_args")}
    output = job.output or os.path.basename(writer.log_path(job, "NUMBER")).replace("%a", "INDEX")
    more = (f"chdir: {job.chdir} (the current directory)", f"interpreter: {job.interpreter} (this one)")
    notes = [*spared(job), *([f"{TOKEN} is not secret in this job: {shows}"] if TOKEN in os.environ else [])]
    report(ctx, {**vars(job), **typed, "output": output}, otherwise, notes, {}, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)
        return 0
    check_on_path(scheduler.submits, scheduler.system, os.environ)
    prepare_log(job.chdir, "--output", output)
    return take(ctx, target, job, script, scheduler, partial(writer.log_path, job))


def spared(job: BatchJob | HostsJob) -> Iterator[str]:
    """What to know of spares."""
    if job.spares:
        waits = "1 waits as a spare" if job.spares == 1 else f"{job.spares} wait as spares"
        yield f"of {job.nodes} nodes {job.nodes - job.spares} run ranks, and {waits}"


def check_follow(ctx: click.Context) -> None:
    """Refuse to follow an array."""
    if ctx.params["array"] and ctx.params["follow"]:
        what = f"--follow does not work with --array {ctx.params['array']}: each job has its own log"
        raise UsageError(what, "leave one out")


def take(
    ctx: click.Context,
    target: str,
    job: BatchJob | HostsJob,
    script: str,
    scheduler: Scheduler,
    log: Callable[[str], str],
    errors: Callable[[str], str] | None = None,
) -> int:
    """Hand the script in and keep the job; with --follow follow it to its end, and return its exit code.

    ``log`` and ``errors`` say where these files of a job of some number are.
    """
    from ddplaunch.queue.follower import Follower
    from ddplaunch.queue.following import follow as follow_to_its_end
    from ddplaunch.queue.following import say

    given = scheduler.hand_in(script, os.environ)
    files = log(given.number), errors(given.number) if errors else None
    lines = [f"job {given.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}", f"log: {files[0]}"]
    lines += [f"errors: {files[1]}"] if files[1] else []
    kept = None if ctx.params["no_history"] else _keep(ctx, job, given, target, files, scheduler)
    stop = f"ddplaunch stop {given.number}" if kept else shlex.join([scheduler.cancels, *scheduler.words(given)])
    if not ctx.params["follow"]:
        one = replace(given, index="INDEX") if job.array else given
        attach = f"ddplaunch attach {one.typed}" if kept or ctx.params["scheduler"] == "slurm" else None
        follow = attach or f"tail -n +1 -F {shlex.quote(files[0])}"
        click.echo(os.fsencode("\n".join([*lines, f"follow: {follow}", f"cancel: {stop}"])))
        return 0
    for line in (*lines, f"cancel: {stop}"):
        say(line)
    follower = Follower(given, scheduler, sys.stdout.buffer, sys.stderr.buffer, say, files=files)
    return follow_to_its_end(given, files[0], follower, kept)


def _keep(
    ctx: click.Context,
    job: BatchJob | HostsJob,
    given: JobId,
    target: str,
    files: tuple[str, str | None],
    scheduler: Scheduler,
) -> Submitted:
    """Keep the job for ``ddplaunch ps`` and the others."""
    import time

    from ddplaunch.queue import submitted

    kept = submitted.Submitted(
        number=given.number,
        cluster=given.cluster,
        name=job.job_name,
        target=" ".join([target, *typed_on(ctx).line.program]),
        nodes=job.nodes,
        array=ctx.params["array"],
        cwd=job.chdir,
        log=files[0],
        run_id=ctx.params["run_id"],
        python=job.interpreter,
        image=ctx.params["container_image"],
        moment=time.time(),
        scheduler=ctx.params["scheduler"],
        errors=files[1],
    )
    submitted.keep(kept)
    return kept


def requeue(ctx: click.Context) -> Requeue:
    """What --requeue means in seconds and signals."""
    from ddplaunch.commands.submit.slurm import Requeue

    max_times: int = ctx.params["requeue"]
    warning: int | None = ctx.params["preempt_signal"]
    name = "none" if warning is None else signal.Signals(warning).name.removeprefix("SIG")
    if warning is None or warning in (signal.SIGTERM, signal.SIGHUP):
        hint = "leave --preempt-signal out: scancel sends SIGTERM too, and a cancelled job must not come back"
        raise UsageError(f"--requeue {max_times} does not work with --preempt-signal {name}", hint)
    for words in ctx.params["sbatch_args"]:
        if words.startswith(("--signal", "--no-requeue")):
            hint = "--preempt-grace says how long before the end the warning comes"
            raise UsageError(f"--sbatch-arg {words} does not work with --requeue {max_times}", hint)
    requeue = Requeue(max_times, name, ctx.params["preempt_grace"], ctx.params["grace"])
    time: str = ctx.params["time"] or "UNLIMITED"
    limit = seconds(time)
    if limit is not None and limit <= requeue.before_the_end:
        raise UsageError(
            f"--time {time} is {limit} s, and the warning comes {requeue.before_the_end} s before its end"
            f" (--preempt-grace {requeue.grace:g} and --grace {requeue.stopping:g})",
            "give it more time, or a shorter --preempt-grace",
        )
    return requeue


def setups(ctx: click.Context, name: str) -> Iterator[Setup]:
    """Tell files from commands. A file that a file of defaults names is looked for beside that one."""
    from ddplaunch.commands.submit.slurm import Setup

    folder = current_directory()
    if source_of(ctx, name) is Source.FILE:
        folder = os.path.dirname(typed_on(ctx).defaults.values[name].file)
    for text in ctx.params[name]:
        path = os.path.join(folder, os.path.expanduser(text))
        if os.path.isfile(path):
            yield Setup(path, is_file=True)
        elif len(text.split()) == 1 and (text.endswith(".sh") or "/" in text):
            raise UsageError(f"--{name} {text}: no such file in {folder}", "a command has more than one word")
        elif text.strip():
            yield Setup(text)


def prepare_log(chdir: str, option: str, pattern: str) -> None:
    """Make a log's folder, as no scheduler does, and try to write there: else the job fails without a message."""
    path = os.path.join(chdir, pattern)
    where = folder = os.path.dirname(path)
    if set("%$^") & set(os.path.dirname(pattern)):
        return
    probe = os.path.join(folder, f".ddplaunch-{os.getpid()}")
    try:
        if os.path.exists(path):
            where = path
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            os.makedirs(folder, exist_ok=True)
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            os.unlink(probe)
    except OSError as error:
        message = f"cannot write the log: {where}: {error.strerror}"
        raise UsageError(message, f"{option} DIR/{os.path.basename(pattern)} names another folder") from None
