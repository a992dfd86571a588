"""Command lines of the OpenSSH client: the user's configuration, keys and known hosts apply."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.cli.host_connector import HostConnector, NodeCommand
from ddplaunch.system.plan.launch_command import forwarded_variables, python_command

if TYPE_CHECKING:  # every command about a run loads this module: without the cluster systems
    from ddplaunch.system.clusters.host_spec import Host

REMOTE_STATEMENT = "from ddplaunch.features.ssh.remote_launcher import main; sys.exit(main())"

CONNECT_TIMEOUT_S = 15  # unless the user's configuration has a limit: TCP's own is two minutes

_NEEDED_TO_START = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables without which the interpreter on the host may not start, or not find ddplaunch."""

_OVERRIDDEN = {
    "BatchMode": "yes",
    "RequestTTY": "no",  # a terminal would change the bytes written to stdin
    "RemoteCommand": "none",
    "ControlMaster": "no",
    "PermitLocalCommand": "no",  # its output would mix with the host's
    "ClearAllForwardings": "yes",  # a second connection cannot forward the same ports, and may fail
    "ForwardX11": "no",
    "Tunnel": "no",
    "LogLevel": "INFO",  # ssh's default, at which it prints why it ends
}
"""Settings of a user's configuration that suit a shell and would break a job."""

_OVERRIDDEN_WHERE_KNOWN = {"SessionType": "default", "StdinNull": "no", "ForkAfterAuthentication": "no"}
"""More of them, new in OpenSSH 8.7; an older client would refuse them."""


class SshRoute(Struct, frozen=True):
    """How ssh reaches a host, by the user's configuration."""

    address: str
    first_hop: str  # the machine that ssh connects to: the host itself, or a jump host
    options: tuple[str, ...]  # options of ssh that overrule the user's configuration


def resolve_ssh_config(name: str) -> SshRoute:
    """Read the user's configuration of a host with ``ssh -G``; makes no connection.

    Raises UsageError if there is no ssh client, or it rejects the configuration.
    """
    if shutil.which("ssh") is None:
        raise UsageError("--hosts needs ssh, which is not on PATH", "install the OpenSSH client")
    done = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, check=False, errors="replace")
    if done.returncode:
        reason = sanitize_line(done.stderr, 400) or "ssh -G failed"
        raise UsageError(f"{name}: {reason}", f"fix your ssh configuration until this succeeds: ssh -G {name}")
    settings = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    address = settings.get("hostname", name)
    jump, proxy = (settings.get(key, "none") for key in ("proxyjump", "proxycommand"))
    first = jump.partition(",")[0] if jump != "none" else proxy if proxy != "none" else address
    more = {name: value for name, value in _OVERRIDDEN_WHERE_KNOWN.items() if name.lower() in settings}
    options = [f"-o{name}={value}" for name, value in (_OVERRIDDEN | more).items()]
    if settings.get("connecttimeout", "none") in ("none", "0"):
        options.append(f"-oConnectTimeout={CONNECT_TIMEOUT_S}")
    return SshRoute(address, first, tuple(options))


def ssh_command(
    name: str,
    route: SshRoute,
    python: str,
    environ: Mapping[str, str],
    heartbeat: float,
    statement: str = REMOTE_STATEMENT,
) -> list[str]:
    """Return the ssh command that runs ``remote_launcher``, or another Python statement, on a host.

    It uses ``exec``, so that the process is sshd's own child. ssh exits after the heartbeat timeout without data from
    the host. An existing master connection is used, as it may be the only way to log in (one-time passwords), but none
    is created (ControlPersist), as it would outlive the job. Raises UsageError if a word has a line break, which the
    login shell could not read.
    """
    alive = [f"-oServerAliveInterval={max(1, round(heartbeat / 3))}", "-oServerAliveCountMax=3"]
    return ["ssh", *route.options, *alive, "--", name, remote_shell_command(python_command(python, statement), environ)]


def interactive_ssh_command(host: str, words: list[str], environ: Mapping[str, str], *, terminal: bool) -> list[str]:
    """Return the ssh command that runs a ddplaunch command on a host, on this terminal or with pipes."""
    how = ["LogLevel=ERROR", "ServerAliveInterval=15", "ServerAliveCountMax=3"]
    how += [f"{name}={_OVERRIDDEN[name]}" for name in ("RemoteCommand", "ClearAllForwardings", "PermitLocalCommand")]
    return [
        "ssh",
        "-t" if terminal else "-T",
        *(f"-o{each}" for each in how),
        "--",
        host,
        remote_shell_command(words, environ),
    ]


def remote_shell_command(words: list[str], environ: Mapping[str, str]) -> str:
    """Return a command as one line for the host's login shell. Raises UsageError as ``ssh_command``."""
    variables = ["PYTHONSAFEPATH=1"]
    for variable in _NEEDED_TO_START:
        if variable in environ:
            folders = [os.path.abspath(each) if each else each for each in environ[variable].split(os.pathsep)]
            variables.append(f"{variable}={os.pathsep.join(folders)}")
    words = ["env", *variables, *words]
    for word in words:
        if "\n" in word:
            what = f"'{sanitize_line(word, 200)}' has a line break, and some login shells cannot read that"
            raise UsageError(what, "use a folder or a value without a line break")
    return f"exec {shlex.join(words)}"


class SshConnector(HostConnector):
    """Runs commands on hosts over SSH."""

    def interactive_command(
        self, host: str, words: list[str], *, terminal: bool, environ: Mapping[str, str] = os.environ
    ) -> list[str]:
        return interactive_ssh_command(host, words, environ, terminal=terminal)

    def python_commands(
        self, hosts: Sequence[Host], python: str, statement: str, timeout_s: float
    ) -> list[NodeCommand]:
        commands, environ = [], forwarded_variables(os.environ)
        for host in hosts:
            route, name = resolve_ssh_config(host.destination), host.destination
            words = ssh_command(name, route, python, environ, timeout_s, statement)
            commands.append(NodeCommand(host.name, route.address, words, f"ssh {name} true"))
        return commands
