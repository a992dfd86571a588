"""A Slurm cluster: its daemons on virtual hosts, and its commands."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.tools.slurm.configuration import FOLDER, set_up, slurm_conf
from tests.tools.virtual_hosts.cluster import Cluster, ClusterError
from tests.tools.virtual_hosts.host import Host
from tests.tools.virtual_hosts.network import Network
from tests.tools.virtual_hosts.network import unsupported as no_hosts

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
"""The states of a job that will not run again."""

COMMANDS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
"""What there must be, and the Debian packages that have it."""

_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "CUDA_VISIBLE_DEVICES")
"""How the variables begin that a job would inherit from a job, or a machine with GPUs, in which the tests run."""


class Slurm(Cluster):
    """A cluster whose nodes are idle when this returns.

    All commands run on n0, where a user would have logged in, in ``folder``, which
    is also where jobs leave their output. The partitions are ``low``, the default, and ``high``, which preempts it.
    ``cpus`` and ``gpus`` are those of each node and need not be there.
    ``settings``: more of slurm.conf, in place of what ``configuration`` has.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        gpus: int = 0,
        cpus: int = 8,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(network)
        self.folder, self._gpus = folder, gpus
        self.environment = {"SLURM_CONF": f"{FOLDER}/slurm.conf"}
        """What a command on any of the hosts needs to talk to it."""
        self._conf = slurm_conf(self.login.name, [node.name for node in self.nodes], cpus, gpus, settings or {})
        self._key = secrets.token_hex(64)
        self._outputs: dict[int, Path] = {}
        try:
            self._set_up(network.hosts)
            self.daemon(self.login, "slurmctld", "-D", "-c")
            # A slurmd that finds no controller tries again only after a second.
            self.wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False), "the controller")
            self._start_nodes(self.nodes)
        except BaseException:
            self.close()
            raise

    def join(self, node: Host) -> None:
        """Let a compute node that was booted again be one of the cluster."""
        self._set_up([node])
        self._start_nodes([node])

    # Daemons

    def daemon(self, host: Host, *words: str | Path) -> subprocess.Popen[Any]:
        """Start a daemon on a host; Ctrl-C is not for it."""
        # What it says before it knows its log, it says here.
        words = ("sh", "-c", f'exec "$0" "$@" </dev/null >>{FOLDER}/{words[0]}.err 2>&1', *words)
        return host.start(words, env=self._surroundings(), cwd="/", start_new_session=True)

    def _set_up(self, hosts: Iterable[Host]) -> None:
        words = ["sh", "-c", set_up(self._conf, self._gpus, self._key)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        for host, process in [(host, host.start(words, **pipes)) for host in hosts]:
            output, _ = process.communicate()
            if process.returncode:
                raise ClusterError(f"the set-up of {host.name}: {output}")

    def _start_nodes(self, nodes: list[Host]) -> None:
        for node in nodes:
            self.daemon(node, "slurmd", "-D")
        self.wait_until_idle(nodes)

    def wait_until_idle(self, nodes: list[Host] | None = None) -> None:
        """Wait until nothing runs on these nodes or on all, also what a job or step leaves to be cleared away."""
        names = [node.name for node in nodes or self.nodes]

        def idle() -> bool:
            words = ["sinfo", "-h", "-N", "-p", "low", "-n", ",".join(names), "-o", "%T"]
            return self.run(*words, check=False).split() == ["idle"] * len(names)

        self.wait_until(idle, f"{' '.join(names)} to be idle")

    def describe_state(self) -> str:
        return self.run("scontrol", "show", "job", check=False) + self.logs()

    def logs(self) -> str:
        """What the daemons of all hosts that are up have logged lately."""
        script = f"tail -n 30 {FOLDER}/*.log {FOLDER}/*.err"
        return "\n".join(
            f"{host.name}:\n{host.run('sh', '-c', script, check=False)}" for host in self.network.hosts if host.alive
        )

    def _surroundings(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return {**ours, **self.environment}

    # Commands

    def run(self, *words: str | Path, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run any command on the login host and return its stdout."""
        return self.login.run(*words, check=check, env={**self._surroundings(), **(env or {})}, cwd=self.folder)

    def srun(self, *words: str | Path, terminal: bool = False) -> subprocess.Popen[str]:
        """Start ``srun WORDS`` with pipes for its output, or in a terminal whose output goes to such a pipe."""
        line = ["srun", *map(str, words)]
        return self.login.start(
            ["script", "-qec", shlex.join(line), "/dev/null"] if terminal else line,
            env=self._surroundings(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sbatch(self, *words: str | Path, script: str | Path, **env: str) -> int:
        """Submit a script, given as a file or, with or without its first line, as text, and return the job id.

        The job inherits our environment, as Slurm has it, and the variables ``env``.
        """
        if isinstance(script, str):
            text, script = textwrap.dedent(script).lstrip("\n"), self.folder / f"script-{secrets.token_hex(4)}.sh"
            script.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
        return int(self.run("sbatch", "--parsable", *words, script, env=env).partition(";")[0])

    def output(self, job: int) -> str:
        """Return the output of a job so far."""
        file = self._outputs.get(job) or self._outputs.setdefault(job, Path(self.show(job)["StdOut"]))
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, job: int, text: str, times: int = 1, timeout: float = 60) -> str:
        """Wait until a job has written a text so many times, and return all that it has written."""
        self.wait_until(lambda: self.output(job).count(text) >= times, f"{text!r} of job {job}", timeout)
        return self.output(job)

    def show(self, job: int | str) -> dict[str, str]:
        """What ``scontrol show job`` has on a job, also an hour after its end; on the first of an array."""
        line = self.run("scontrol", "-o", "show", "job", str(job)).partition("\n")[0]
        return dict(re.findall(r"(\S+?)=(\S*)", line))

    def state(self, job: int | str) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, …"""
        return self.show(job)["JobState"]

    def wait(self, job: int | str, *states: str, timeout: float = 60) -> str:
        """Wait until a job is in one of the states, by default in one of its end, and return it.

        It is only looked at now and then: a state that soon passes may never be seen.
        """
        wanted, state = states or ENDED, ""

        def there() -> bool:
            nonlocal state
            state = self.state(job)
            return state in wanted

        self.wait_until(there, f"job {job} to be {' or '.join(wanted)}", timeout)
        return state

    def restarts(self, job: int | str) -> int:
        """Return how often a job was requeued."""
        return int(self.show(job)["Restarts"])

    def cancel(self, job: int | str, *words: str) -> None:
        """``scancel WORDS JOB``"""
        self.run("scancel", *words, str(job))

    def requeue(self, job: int | str) -> None:
        """``scontrol requeue JOB``: it runs again after the requeue delay, some 6 s."""
        self.run("scontrol", "requeue", str(job))


def unsupported(*, gpus: int = 0) -> str | None:
    """Return why this machine cannot run such a Slurm, or None."""
    if reason := no_hosts():
        return reason
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(missing)} (packages {' '.join(COMMANDS[command] for command in missing)})"
    if gpus:
        with tempfile.TemporaryDirectory() as folder:
            try:
                os.mknod(f"{folder}/gpu0", stat.S_IFCHR, os.makedev(195, 0))
            except OSError as error:
                return f"device nodes, which GPUs have to be, are not permitted: {error}"
    return None
