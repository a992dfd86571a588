"""Base class of schedulers that accept batch scripts: supported options, writing the script, submitting it.

Each scheduler has a class of its own, registered in ``feature.py``. Those that start one process per job, on
the first of its hosts, share ``hosts_scheduler``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping

import click
from msgspec.structs import asdict, replace

from ddplaunch.base.errors import LaunchError, UsageError, host_name
from ddplaunch.base.redaction import redact_words, redacted_argv
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.text import format_count
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.features.submit.batch_command import parsed_line, print_value_sources
from ddplaunch.features.submit.batch_job import BatchJob, read_batch_job
from ddplaunch.features.submit.code_copies import copy_for_submission, plan_copy
from ddplaunch.features.submit.remote_submission import CURRENT
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.log_follower import LogFollower, follow_job, print_line
from ddplaunch.system.schedulers.scheduler import JobId, Scheduler, SchedulerNotResponding
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_UNREACHABLE = re.compile(
    r"unable to contact|cannot connect|can't connect|connection refused|unable to send message to qmaster|LSF is down",
    re.IGNORECASE,
)
"""What sbatch, qsub and bsub print on stderr where the scheduler does not answer."""


class BatchScheduler(Scheduler):
    """A scheduler that accepts batch scripts."""

    submit_options: tuple[str, ...] = ()  # arguments of the program that submits
    list_command: str  # the command that lists a user's jobs
    pass_through_option: str | None = None  # click's name of the option that passes on other options
    default_outputs: tuple[str, str]  # the log without --output: of a job, and of an array
    # Options that its jobs cannot have, by click's names, with hints what to use instead.
    unsupported_options: Mapping[str, str] = {}
    # Environment variables that override a line of the script, by the option's name without dashes.
    override_variables: Mapping[str, str] = {}

    def read_job(self, ctx: click.Context, target: str) -> BatchJob:
        """Read the options into a job. Raises UsageError for options that this scheduler does not support."""
        for name, hint in self.unsupported_options.items():
            if ctx.params[name]:
                option = next(param.opts[-1] for param in ctx.command.params if param.name == name)
                raise UsageError(f"{option} does not work with --scheduler {ctx.params['scheduler']}", hint)
        self.check_options(ctx)
        name = self.job_name(ctx.params["job_name"] or os.path.basename(target))
        return read_batch_job(ctx, name, ctx.params[self.pass_through_option] if self.pass_through_option else ())

    def check_options(self, ctx: click.Context) -> None:
        """Raise UsageError for values that this scheduler does not accept."""

    def job_name(self, text: str) -> str:
        """Return a text, changed to a job name that the scheduler accepts."""
        return text

    def render_script(self, job: BatchJob) -> str:
        """Return the batch script, which users may read. Raises UsageError if a value cannot be written in a line."""
        return "\n".join(line for part in self.script_parts(job) for line in part) + "\n"

    def script_parts(self, job: BatchJob) -> Iterable[Iterable[str]]:
        """Return the lines of the script, part by part."""
        raise NotImplementedError

    def output_pattern(self, job: BatchJob) -> str:
        """Name of the log, with the scheduler's patterns."""
        return job.output or self.default_outputs[bool(job.array)]

    def log_path(self, job: BatchJob, number: str) -> str:
        """Path of the log of job ``number``, with %a for the index in an array."""
        raise NotImplementedError

    def stderr_path(self, job: BatchJob, number: str) -> str | None:
        """Path of the job's stderr file; None if stderr goes to the log."""
        return None

    def log_name(self, job: BatchJob) -> str:
        """Name of the log before the job has a number."""
        raise NotImplementedError

    def job_notes(self, job: BatchJob) -> Iterator[str]:
        """Yield notes on the job for the user."""
        if job.spares:
            waits = "1 waits as a spare" if job.spares == 1 else f"{job.spares} wait as spares"
            yield f"of {job.nodes} nodes {job.nodes - job.spares} run ranks, and {waits}"

    def environment(self, script: str) -> Mapping[str, str]:
        """Return the environment of the program that submits."""
        return os.environ

    def rejection_hint(self, error: str) -> str:
        """Return a hint for a job that was rejected with this message."""
        raise NotImplementedError

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        """Return the job id in the output of the program that submits; None if there is none."""
        raise NotImplementedError

    def submit_script(self, job: BatchJob, script: str) -> JobId:
        """Submit the script, and print stderr of the program that submits.

        Raises UsageError if that program rejects it, and SchedulerNotResponding if the scheduler cannot be reached.
        """
        words, env = [self.submit_program, *self.submit_options], self.environment(script)
        where = CURRENT[0].folder if CURRENT else None  # the job gets this folder in a variable
        done = subprocess.run(words, input=os.fsencode(script), capture_output=True, env=env, cwd=where, check=False)
        if done.stderr:
            os.write(2, done.stderr)
        if done.returncode:
            if _UNREACHABLE.search(message := done.stderr.decode(errors="replace")):
                what = f"{self.submit_program} cannot reach {self.title}: no job was submitted"
                raise SchedulerNotResponding(what, "see its message above; try again when it is back")
            hint = self.rejection_hint(message)
            what = f"{self.submit_program} rejected the job (exit code {done.returncode})"
            raise UsageError(what, f"see its message above; {hint}")
        # a site's own checks may print something before it
        answer = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        submitted = self.parse_job_id(job, answer)
        if submitted is None:
            what = f"{self.submit_program} accepted the job, but its output has no job id: {answer!r}"
            raise LaunchError(what, f"{self.list_command} lists your jobs")
        return submitted


def submit_job(
    scheduler: BatchScheduler, ctx: click.Context, target: str, job: BatchJob, code: CodeArchive | None = None
) -> int:
    """Print the script, or submit it; with --follow show the log, and return the job's exit code.

    ``code``: the code that is copied for the job.
    """
    dry_run: bool = ctx.params["dry_run"]
    if code:
        job = plan_copy(job, code)
    script = scheduler.render_script(job)
    values = {name: value for name, value in ctx.params.items() if name != "follow"}
    values |= {**asdict(job), "output": scheduler.log_name(job)}
    notes = [*scheduler.job_notes(job), *(code.notes if code else ())]
    values["grid"] = format_count(len(job.grid), "run") if job.grid else None
    default_sources = {"job-name": "the target", "output": "default", "nodes": "default"}
    default_sources |= {"array": "--grid"} if job.grid else {}
    whose = "of the image" if job.container_image else "this one"
    more = (f"chdir: {job.chdir} (the current folder)", f"interpreter: {job.interpreter} ({whose})")
    print_value_sources(ctx, values, default_sources, notes, scheduler.override_variables, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)  # bytes, as submitted: from text, click drops escape sequences
        return 0
    if shutil.which(scheduler.submit_program) is None:
        what = f"{scheduler.submit_program} is not on PATH: this machine has no commands of {scheduler.title}"
        if CURRENT:
            what = f"{host_name()} has no {scheduler.submit_program} on PATH, in a shell without a terminal"
            raise UsageError(what, "set PATH in ~/.bashrc there, before it ends for such shells; or another --via HOST")
        raise UsageError(what, "submit from a login node; --dry-run shows the script on any machine")
    _prepare_log_folder(job.chdir, "--output", scheduler.log_name(job))
    if job.error:
        _prepare_log_folder(job.chdir, "--error", job.error)
    if not code:
        return _record_and_follow(scheduler, ctx, target, job, scheduler.submit_script(job, script), code)
    with copy_for_submission(job, code) as job:
        job_id = scheduler.submit_script(job, scheduler.render_script(job))
    return _record_and_follow(scheduler, ctx, target, job, job_id, code)


def _record_and_follow(
    scheduler: BatchScheduler,
    ctx: click.Context,
    target: str,
    job: BatchJob,
    job_id: JobId,
    code: CodeArchive | None,
) -> int:
    """Store the submitted job, print how to follow and cancel it; with --follow follow it, and return its exit code."""
    files = scheduler.log_path(job, job_id.number), scheduler.stderr_path(job, job_id.number)
    runs = f", {format_count(len(job.grid), 'run')}" if job.grid else ""
    lines = [f"job {job_id.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}{runs}", f"log: {files[0]}"]
    lines += [f"errors: {files[1]}"] if files[1] else []
    lines += [f"code: {code}"] if code else []
    record = _make_record(ctx, job, job_id, target, files)
    saved = record if not ctx.params["no_history"] and submitted_jobs.save_job(record) else None
    if CURRENT:
        CURRENT[0].job = record
    stop = shlex.join([scheduler.cancel_program, *scheduler.job_arguments(job_id)])
    if saved:
        stop = f"ddplaunch stop {job_id.number}"
    if not ctx.params["follow"]:
        one = replace(job_id, index="INDEX") if job.array else job_id
        attach = f"ddplaunch attach {one.text}" if saved or ctx.params["scheduler"] == "slurm" else None
        follow = attach or f"tail -n +1 -F {shlex.quote(files[0])}"
        click.echo(os.fsencode("\n".join([*lines, f"follow: {follow}", f"cancel: {stop}"])))
        return 0
    for line in (*lines, f"cancel: {stop}"):
        print_line(line)
    return follow_job(LogFollower(job_id, scheduler, files), files[0], saved)


def _make_record(
    ctx: click.Context, job: BatchJob, job_id: JobId, target: str, files: tuple[str, str | None]
) -> SubmittedJob:
    """Return the record of the job, for ``ddplaunch ps`` and other commands."""
    return SubmittedJob(
        number=job_id.number,
        cluster=job_id.cluster,
        name=job.job_name,
        target=" ".join([target, *redact_words(parsed_line(ctx).line.program_args)]),
        nodes=job.nodes,
        array=job.array,
        cwd=job.chdir,
        log=files[0],
        run_id=ctx.params["run_id"],
        python=job.interpreter,
        image=job.container_image,
        moment=time.time(),
        scheduler=ctx.params["scheduler"],
        errors=files[1],
        code_copy=job.code.copy if job.code else None,
        argv=redacted_argv(),
        typed_in=current_folder(),
        runs=tuple(run.name for run in job.grid),
    )


def _prepare_log_folder(chdir: str, option: str, pattern: str) -> None:
    """Create the log's folder, which no scheduler does, and check that it is writable: else the job fails silently."""
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
        raise UsageError(message, f"choose another folder: {option} DIR/{os.path.basename(pattern)}") from None
