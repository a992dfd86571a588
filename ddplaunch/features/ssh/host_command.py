"""Runs a command like ``logs`` or ``stop`` on the first host of a job that was started from here over SSH."""

from __future__ import annotations

import os
import subprocess

import click

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.base.text import join_names, shell_quote
from ddplaunch.core.output.tty import is_interactive
from ddplaunch.features.ssh import job_records
from ddplaunch.features.ssh.job_records import SshJob
from ddplaunch.features.ssh.ssh_session import interactive_ssh_command
from ddplaunch.system.plan.launch_command import python_command

_WORDS = "ddplaunch.on_host"
_LOCAL = {"hosts", "since", "every"}
"""Parameters with which a command does not concern one job, or reaches other hosts by itself."""

_WRITING = {"html": "--html", "serve": "--serve", "output": "--output"}
"""Parameters that name a file or port of this machine."""

_SSH_FAILED = 255  # ssh's own exit code


class OnHost(Exception):
    """Raised by a command without RUN if the job is one over SSH, whose launcher and record are on its first host."""

    def __init__(self, job: SshJob) -> None:
        super().__init__(job)
        self.job = job


class HostCommand(click.Command):
    """A command whose argument RUN may name a job over SSH, whose launcher and record are on its first host."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command here, or on the job's first host."""
        run: str | None = ctx.params["run"]
        about_one = run is not None or getattr(self.params[0].type, "running", False)
        if about_one and not any(ctx.params.get(name) for name in _LOCAL) and (job := job_records.find_remote_job(run)):
            return _on_first_host(job, ctx, run)
        try:
            return super().invoke(ctx)
        except OnHost as found:
            return _on_first_host(found.job, ctx, run)


def _on_first_host(job: SshJob, ctx: click.Context, run: str | None) -> int:
    """Run the command on the job's first host; return its exit code.

    Raises:
        UsageError: the command writes a file, which would be on that host.
        LaunchError: ssh cannot connect to the host.
    """
    words = [str(ctx.info_name), *(job.run_id if word == run else word for word in ctx.meta[_WORDS])]
    if run is None:
        words.append(job.run_id)
    for name, option in _WRITING.items():
        source = ctx.get_parameter_source(name) if name in ctx.params else None
        if source is not None and source.name == "COMMANDLINE":
            what = f"{job.run_id} runs on {join_names(job.hosts)}: run the command with {option} there"
            raise UsageError(what, _ssh_hint(job, words))
    return CommandOnHost(job, words).wait()


def _ssh_hint(job: SshJob, words: list[str]) -> str:
    return f"ssh {job.hosts[0]} {shell_quote(['ddplaunch', *words])}"


class CommandOnHost:
    """A ddplaunch command that runs on the first host of a job."""

    def __init__(self, job: SshJob, words: list[str], *, stdin: bool = True) -> None:
        """``stdin``: the command reads this process's stdin, which only one command at a time can."""
        host, self._job, self._words = job.hosts[0], job, words
        click.echo(f"ddplaunch: {job.run_id} runs on {join_names(job.hosts)}; connecting to {host} over SSH", err=True)
        terminal = stdin and os.isatty(0) and is_interactive(1)
        argv = interactive_ssh_command(host, [*python_command(job.python), *words], os.environ, terminal=terminal)
        self._process = subprocess.Popen(argv, stdin=None if stdin else subprocess.DEVNULL)

    def wait(self) -> int:
        """Wait for its end and return its exit code. Raises LaunchError if ssh cannot connect to the host."""
        try:
            code = self._process.wait()
        except BaseException:
            self._process.kill()
            raise
        if code == _SSH_FAILED:
            hint = f"log in there and run: {_ssh_hint(self._job, self._words)}"
            error = LaunchError(f"ssh cannot connect to {self._job.hosts[0]}", hint)
            error.exit_code = EXIT_UNAVAILABLE
            raise error
        return code
