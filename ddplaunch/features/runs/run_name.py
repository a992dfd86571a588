"""The click type of arguments that name a run, with shell completion."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ddplaunch.features.runs import run_lookup
from ddplaunch.features.ssh import job_records
from ddplaunch.system.schedulers import submitted_jobs


class RunName(click.types.StringParamType):
    """The name of a run or the number of a submitted job, with shell completion."""

    def __init__(self, *, running: bool = False) -> None:
        """``running``: complete only jobs that are running."""
        self.running = running

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [name for name, job in run_lookup.list_known().items() if job or not self.running]
        names += [job.number for job in submitted_jobs.list_jobs() if job.code is None or not self.running]
        names += [job.run_id for job in job_records.read_remote_jobs() if job.is_running or not self.running]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
