"""A command about a run, which is run on the first host of a job that was started from here over SSH."""

from __future__ import annotations

import os
import subprocess

import click

from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.job import over_ssh
from ddplaunch.job.over_ssh import SshJob
from ddplaunch.output.terminal import is_interactive
from ddplaunch.plan.command import python_command
from ddplaunch.ssh.client import interactive_ssh_command
from ddplaunch.words import join_names, shell_quote

_WORDS = "ddplaunch.on_host"
_LOCAL = {"hosts", "since", "every"}
"""Parameters with which the command is not about one job, or goes elsewhere by itself."""

_WRITING = {"html": "--html", "serve": "--serve", "output": "--output"}
"""Parameters that name a file, or a port, of this machine."""

_SSH_FAILED = 255  # ssh's own exit code


class OnHost(Exception):
    """The job that is meant, where none was named, has its launcher and its record on the first of its hosts."""

    def __init__(self, job: SshJob) -> None:
        super().__init__(job)
        self.job = job


class HostCommand(click.Command):
    """A command whose argument RUN may mean a job over SSH; that has its launcher and its record on the first host."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command here, or there."""
        run: str | None = ctx.params["run"]
        about_one = run is not None or getattr(self.params[0].type, "running", False)
        if about_one and not any(ctx.params.get(name) for name in _LOCAL) and (job := over_ssh.find_remote_job(run)):
            return _on_first_host(job, ctx, run)
        try:
            return super().invoke(ctx)
        except OnHost as found:
            return _on_first_host(found.job, ctx, run)


def _on_first_host(job: SshJob, ctx: click.Context, run: str | None) -> int:
    """Run the command that was typed on the first host; return its exit code.

    Raises:
        UsageError: it writes a file, which would be on that host.
        LaunchError: ssh does not reach the host.
    """
    words = [str(ctx.info_name), *(job.run_id if word == run else word for word in ctx.meta[_WORDS])]
    if run is None:
        words.append(job.run_id)
    for name, option in _WRITING.items():
        source = ctx.get_parameter_source(name) if name in ctx.params else None
        if source is not None and source.name == "COMMANDLINE":
            what = f"{job.run_id} runs on {join_names(job.hosts)}: {option} must be typed there"
            raise UsageError(what, _by_hand(job, words))
    return CommandOnHost(job, words).wait()


def _by_hand(job: SshJob, words: list[str]) -> str:
    return f"ssh {job.hosts[0]} {shell_quote(['ddplaunch', *words])}"


class CommandOnHost:
    """A command of ours that runs on the first host of a job."""

    def __init__(self, job: SshJob, words: list[str], *, stdin: bool = True) -> None:
        """``stdin``: it reads ours, as one command at a time can."""
        host, self._job, self._words = job.hosts[0], job, words
        click.echo(f"ddplaunch: {job.run_id} runs on {join_names(job.hosts)}; by SSH to {host}", err=True)
        terminal = stdin and os.isatty(0) and is_interactive(1)
        typed = interactive_ssh_command(host, [*python_command(job.python), *words], os.environ, terminal=terminal)
        self._process = subprocess.Popen(typed, stdin=None if stdin else subprocess.DEVNULL)

    def wait(self) -> int:
        """Wait for its end and return its exit code. Raises LaunchError if ssh does not reach the host."""
        try:
            code = self._process.wait()
        except BaseException:
            self._process.kill()
            raise
        if code == _SSH_FAILED:
            hint = f"log in there, and type: {_by_hand(self._job, self._words)}"
            error = LaunchError(f"ssh does not reach {self._job.hosts[0]}", hint)
            error.exit_code = EXIT_UNAVAILABLE
            raise error
        return code
