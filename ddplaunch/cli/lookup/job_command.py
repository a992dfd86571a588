"""The argument RUN with shell completion, and a command class that runs a command on the first host of its job."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import join_names
from ddplaunch.cli.lookup.remote_jobs import JobOnOtherHosts, RemoteJob, find_remote_job, list_remote_jobs
from ddplaunch.cli.lookup.run_index import index_runs
from ddplaunch.system.schedulers import submitted_jobs

_WORDS = "ddplaunch.on_host"
_LOCAL = {"hosts", "since", "every"}
"""Parameters with which a command does not concern one job, or reaches other hosts by itself."""

_WRITING = {"html": "--html", "serve": "--serve", "output": "--output"}
"""Parameters that name a file or port of this machine."""


class RunName(click.types.StringParamType):
    """The name of a run or the number of a submitted job, with shell completion."""

    def __init__(self, *, running: bool = False) -> None:
        """``running``: complete only jobs that are running."""
        self.running = running

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [name for name, job in index_runs().jobs.items() if job or not self.running]
        names += [job.number for job in submitted_jobs.list_jobs() if job.code is None or not self.running]
        names += [job.run_id for job in list_remote_jobs() if job.is_running or not self.running]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class JobCommand(click.Command):
    """A command whose argument RUN may name a job on other hosts; the command then runs on the first of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command here, or on the job's first host."""
        run: str | None = ctx.params["run"]
        about_one = run is not None or getattr(self.params[0].type, "running", False)
        if about_one and not any(ctx.params.get(name) for name in _LOCAL) and (job := find_remote_job(run)):
            return _run_on_first_host(job, ctx, run)
        try:
            return super().invoke(ctx)
        except JobOnOtherHosts as found:
            return _run_on_first_host(found.job, ctx, run)


def _run_on_first_host(job: RemoteJob, ctx: click.Context, run: str | None) -> int:
    """Run the command on the job's first host; return its exit code.

    Raises UsageError if the command writes a file, which would be on that host, and LaunchError if the host cannot be
    reached.
    """
    words = [str(ctx.info_name), *(job.name_on_host(word) if word == run else word for word in ctx.meta[_WORDS])]
    if run is None:
        words.append(job.run_id)
    for name, option in _WRITING.items():
        source = ctx.get_parameter_source(name) if name in ctx.params else None
        if source is not None and source.name == "COMMANDLINE":
            what = f"{job.run_id} runs on {join_names(job.hosts)}: run the command with {option} there"
            raise UsageError(what, job.format_command(words))
    return job.start_on_first_host(words)()
