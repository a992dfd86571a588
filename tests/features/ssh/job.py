"""A job over SSH, started on n0 of a network of hosts, and its processes that are left on each."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import BackgroundCommand, clean_environment, ddplaunch_command, wait_until
from tests.features.ssh.sshd import Sshd
from tests.tools.faults.trial import command_line
from tests.tools.virtual_hosts.host import Host

LAUNCHER = r"from ddplaunch\.cli .* run "
"""The command line of a launcher that our far end starts."""

_OURS = r"-m ddplaunch|from ddplaunch\.|/(zygote|worker)\.py |train\.py|^(\S+/)?ssh "


def refusal(failed: int, hosts: int) -> str:
    """Return the first line about a job that was not started, as some hosts cannot run it."""
    return f"ddplaunch: {failed} of {hosts} hosts cannot run the job; nothing was started"


class Job(BackgroundCommand):
    """``ddplaunch run WORDS`` on n0, its output in files."""

    def __init__(
        self,
        servers: Sshd,
        folder: Path,
        *words: str,
        env: dict[str, str] | None = None,
        pipe: bool = False,
        terminal: int | None = None,
    ) -> None:
        """``pipe``: stdout is one, to be read from ``process.stdout``. ``terminal``: stderr is this descriptor."""
        self.hosts = servers.network.hosts
        self.out, self.err = folder / "job.out", folder / "job.err"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), **servers.environment}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = self.hosts[0].start(
                ddplaunch_command("run", *words),
                cwd=folder,
                env=clean_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=err if terminal is None else terminal,
                start_new_session=True,
            )

    def left(self, hosts: Sequence[Host] | None = None) -> list[str]:
        """Return its processes that still run."""
        return [
            f"{host.name}: {command_line(pid)}"
            for host in (self.hosts if hosts is None else hosts)
            for pid in host.find(_OURS)
        ]

    def assert_nothing_left(self, hosts: Sequence[Host] | None = None, timeout: float = 10) -> None:
        """Assert that none of its processes is left on these hosts, or on all."""
        wait_until(lambda: not self.left(hosts), f"the end of {self.left(hosts)}", timeout)
