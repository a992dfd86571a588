"""Runs a command like ``logs`` or ``stop`` on the first host of a job that was started from here over SSH."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import click

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.base.text import join_names
from ddplaunch.core.control_socket.remote_job import RemoteJob
from ddplaunch.core.output.tty import is_interactive
from ddplaunch.features.ssh.ssh_session import interactive_ssh_command
from ddplaunch.system.plan.launch_command import python_command

_SSH_FAILED = 255  # ssh's own exit code


class HostCommand:
    """A ddplaunch command that runs on the first host of a job."""

    def __init__(self, job: RemoteJob, words: Sequence[str], *, stdin: bool = True) -> None:
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
            hint = f"log in there and run: {self._job.format_command(self._words)}"
            error = LaunchError(f"ssh cannot connect to {self._job.hosts[0]}", hint)
            error.exit_code = EXIT_UNAVAILABLE
            raise error
        return code
