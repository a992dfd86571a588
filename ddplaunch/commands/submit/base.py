"""A scheduler that jobs are submitted to: which options a job may have, its script, and how that is handed in.

Each has a class of its own, with its line in ``queue/table.py``. Those that start one process a job, on the first of
its hosts, share ``hosts``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping

import click

from ddplaunch.cli.batch_command import parsed_line as typed_on
from ddplaunch.cli.batch_command import print_sources
from ddplaunch.commands.submit.job import BatchJob, read_batch_job
from ddplaunch.dataclass import replace
from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.queue import submitted
from ddplaunch.queue.follower import LogFollower, follow_job, print_line
from ddplaunch.queue.scheduler import JobId, Scheduler
from ddplaunch.queue.submitted import SubmittedJob


class BatchScheduler(Scheduler):
    """A scheduler that takes scripts."""

    submit_options: tuple[str, ...] = ()  # of the program that submits, beside its name
    list_command: str  # what shows a user's jobs
    pass_through_option: str | None = None  # click's name of the option that passes others on
    unsupported_options: Mapping[
        str, str
    ] = {}  # options that its jobs cannot have, by click's names, and what to type instead
    override_variables: Mapping[
        str, str
    ] = {}  # what overrules a line of the script, by the option's name without dashes

    def read_job(self, ctx: click.Context, target: str) -> BatchJob:
        """Read the options into a job. Raises UsageError for what this scheduler cannot do."""
        for name, hint in self.unsupported_options.items():
            if ctx.params[name]:
                option = next(param.opts[-1] for param in ctx.command.params if param.name == name)
                raise UsageError(f"{option} does not work with --scheduler {ctx.params['scheduler']}", hint)
        self.check_options(ctx)
        name = self.job_name(ctx.params["job_name"] or os.path.basename(target))
        return read_batch_job(ctx, name, ctx.params[self.pass_through_option] if self.pass_through_option else ())

    def check_options(self, ctx: click.Context) -> None:
        """Raises UsageError for values that this scheduler cannot take."""

    def job_name(self, text: str) -> str:
        """A name that it takes."""
        return text

    def render_script(self, job: BatchJob) -> str:
        """Write the job as a script, short enough to read. Raises UsageError if a value fits in none of its lines."""
        raise NotImplementedError

    def log_path(self, job: BatchJob, number: str) -> str:
        """Where the log of job ``number`` will be; %a stands for its index in an array."""
        raise NotImplementedError

    def stderr_path(self, job: BatchJob, number: str) -> str | None:
        """Where its stderr will be, if that is not the log."""
        return None

    def log_name(self, job: BatchJob) -> str:
        """How the log is called before the job has a number."""
        raise NotImplementedError

    def job_notes(self, job: BatchJob) -> Iterator[str]:
        """What people should know of the job."""
        if job.spares:
            waits = "1 waits as a spare" if job.spares == 1 else f"{job.spares} wait as spares"
            yield f"of {job.nodes} nodes {job.nodes - job.spares} run ranks, and {waits}"

    def environment(self, script: str) -> Mapping[str, str]:
        """The variables for the program that submits."""
        return os.environ

    def rejection_hint(self, said: str) -> str:
        """What to look at after it has refused a job, and ``said`` why."""
        raise NotImplementedError

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        """The id in its answer; None if there is none."""
        raise NotImplementedError

    def submit_script(self, job: BatchJob, script: str) -> JobId:
        """Hand the script to the program that submits, whose stderr goes to ours. Raises UsageError if it refuses."""
        words, env = [self.submit_program, *self.submit_options], self.environment(script)
        done = subprocess.run(words, input=os.fsencode(script), capture_output=True, env=env, check=False)
        if done.stderr:
            os.write(2, done.stderr)
        if done.returncode:
            advice = self.rejection_hint(done.stderr.decode(errors="replace"))
            what = f"{self.submit_program} refused the job (exit code {done.returncode})"
            raise UsageError(what, f"{self.submit_program} says why above; {advice}")
        # a site's own checks may print before it
        answer = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        found = self.parse_job_id(job, answer)
        if found is None:
            what = f"{self.submit_program} took the job, but its answer is not a job id: {answer!r}"
            raise LaunchError(what, f"{self.list_command} lists your jobs")
        return found


def submit_job(scheduler: BatchScheduler, ctx: click.Context, target: str, job: BatchJob) -> int:
    """Print the script, or hand it in; with --follow show the log, and return the job's exit code."""
    dry_run: bool = ctx.params["dry_run"]
    script = scheduler.render_script(job)
    values = {name: value for name, value in ctx.params.items() if name != "follow"}
    values |= {**vars(job), "output": scheduler.log_name(job)}
    otherwise = {"job-name": "the target", "output": "default", "nodes": "default"}
    whose = "of the image" if job.container_image else "this one"
    more = (f"chdir: {job.chdir} (the current directory)", f"interpreter: {job.interpreter} ({whose})")
    print_sources(ctx, values, otherwise, scheduler.job_notes(job), scheduler.override_variables, more, dry_run=dry_run)
    if dry_run:
        click.echo(os.fsencode(script), nl=False)  # as it would be handed in: of text, click drops escape sequences
        return 0
    if shutil.which(scheduler.submit_program) is None:
        what = f"{scheduler.submit_program} is not on PATH: this machine has no commands of {scheduler.title}"
        raise UsageError(what, "submit from a login node; --dry-run shows the script on any machine")
    _check_log_path(job.chdir, "--output", scheduler.log_name(job))
    if job.error:
        _check_log_path(job.chdir, "--error", job.error)
    return _follow(scheduler, ctx, target, job, scheduler.submit_script(job, script))


def _follow(scheduler: BatchScheduler, ctx: click.Context, target: str, job: BatchJob, given: JobId) -> int:
    """Keep the job, and say how it is seen; with --follow follow it to its end, and return its exit code."""
    files = scheduler.log_path(job, given.number), scheduler.stderr_path(job, given.number)
    lines = [f"job {given.number}: {target} on {job.nodes} node{'s' * (job.nodes > 1)}", f"log: {files[0]}"]
    lines += [f"errors: {files[1]}"] if files[1] else []
    kept = None if ctx.params["no_history"] else _save_job(ctx, job, given, target, files)
    stop = (
        f"ddplaunch stop {given.number}"
        if kept
        else shlex.join([scheduler.cancel_program, *scheduler.job_arguments(given)])
    )
    if not ctx.params["follow"]:
        one = replace(given, index="INDEX") if job.array else given
        attach = f"ddplaunch attach {one.text}" if kept or ctx.params["scheduler"] == "slurm" else None
        seen = attach or f"tail -n +1 -F {shlex.quote(files[0])}"
        click.echo(os.fsencode("\n".join([*lines, f"follow: {seen}", f"cancel: {stop}"])))
        return 0
    for line in (*lines, f"cancel: {stop}"):
        print_line(line)
    return follow_job(LogFollower(given, scheduler, files), files[0], kept)


def _save_job(
    ctx: click.Context, job: BatchJob, given: JobId, target: str, files: tuple[str, str | None]
) -> SubmittedJob:
    """Keep the job for ``ddplaunch ps`` and the others."""
    kept = SubmittedJob(
        number=given.number,
        cluster=given.cluster,
        name=job.job_name,
        target=" ".join([target, *typed_on(ctx).line.program_args]),
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
    )
    submitted.save_job(kept)
    return kept


def _check_log_path(chdir: str, option: str, pattern: str) -> None:
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
