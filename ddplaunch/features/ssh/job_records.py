"""Records of jobs that were started from this machine over SSH: a small file for each, next to the history of runs.

Their launchers, and their histories, are on the hosts. The file names these hosts, so that a command of the user on
this machine can run there. It stays after the end of the job, unless the job has no history.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence

import click
from msgspec.structs import replace

from ddplaunch.base.text import join_names
from ddplaunch.base.tty import is_interactive
from ddplaunch.cli import launcher_command
from ddplaunch.cli.host_connector import HostConnector, make_waiter
from ddplaunch.cli.lookup.remote_jobs import RemoteJob, RunLocator
from ddplaunch.features.ssh.ssh_command import SshConnector, interactive_ssh_command
from ddplaunch.system.record_folder import RecordFolder


class SshJob(RemoteJob, frozen=True):
    """A job that was started over SSH; ``hosts`` are names that ssh knows."""

    def start_on_first_host(self, words: Sequence[str], *, stdin: bool = True) -> Callable[[], int]:
        host = self.hosts[0]
        where = f"{self.run_id} runs on {join_names(self.hosts)}; connecting to {host} over SSH"
        click.echo(f"ddplaunch: {where}", err=True)
        terminal = stdin and os.isatty(0) and is_interactive(1)
        argv = interactive_ssh_command(host, [*launcher_command(self.python), *words], os.environ, terminal=terminal)
        process = subprocess.Popen(argv, stdin=None if stdin else subprocess.DEVNULL)
        hint = f"log in there and run: {self.format_command(words)}"
        return make_waiter(process, f"ssh cannot connect to {host}", hint)

    def remove_record(self) -> None:
        RECORDS.remove(self)


RECORDS = RecordFolder("over-ssh", SshJob, lambda job: f"{job.run_id}.{job.host}.{job.pid}.json", lambda job: job.began)


class SshJobLocator(RunLocator):
    """Finds the jobs that were started over SSH."""

    def list_remote_jobs(self) -> list[RemoteJob]:
        return [*RECORDS.list()]

    def host_connector(self) -> HostConnector:
        return SshConnector()


def record_end(job: SshJob, code: int | None, *, history: bool) -> None:
    """Record the end of a job; remove the record of one that never started (``code`` is None) or has no history."""
    if history and code is not None:
        RECORDS.save(replace(job, ended=time.time(), code=code))
    else:
        job.remove_record()


LOCATOR = SshJobLocator()
