"""An sshd in each virtual host, and a client that knows them."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ddplaunch
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.host import Host
from tests.tools.virtual_hosts.network import Network
from tests.tools.virtual_hosts.network import unsupported as no_hosts

_COMMANDS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
"""What there must be, and the Debian packages that have it."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SERVER = """
Port 22
HostKey {folder}/key-{name}
AuthorizedKeysFile {folder}/authorized
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
PrintMotd no
LogLevel VERBOSE
SetEnv TMPDIR=/dev/shm XDG_RUNTIME_DIR=/dev/shm "XDG_STATE_HOME={folder}/state"{variables}
"""
# UsePAM no, or logins would depend on this machine's; StrictModes no, for folders of tests may lie in any other;
# TMPDIR, because a host whose power is cut removes nothing; XDG_STATE_HOME, because no run of a test is the user's;
# XDG_RUNTIME_DIR, because each host lists its own jobs.

_CLIENT = """
Host *
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


class Sshd:
    """Every host of ``network`` can be logged in to with ``ssh -F config n1``, without a password, when this returns.

    Keys and configurations lie in ``folder``; the daemons end with their hosts. ``variables``: more for all who log in.
    """

    def __init__(self, network: Network, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.network, self.folder = network, folder
        self._variables = "".join(f" {name}={value}" for name, value in (variables or {}).items())
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        self.config, self.known, self.key = folder / "config", folder / "known_hosts", folder / "id"
        self.config.write_text(_CLIENT.format(folder=folder))
        self._make_key(self.key)
        shutil.copy(f"{self.key}.pub", folder / "authorized")
        with self.known.open("w") as known:
            for host in network.hosts:
                key = folder / f"key-{host.name}"
                self._make_key(key)
                names = ",".join(name for name in (host.name, host.address, host.address6) if name)
                known.write(f"{names} {Path(f'{key}.pub').read_text()}")
        self.home = folder / "home"  # of root: what the start files of this machine's root do is not for tests
        self.home.mkdir()
        self._users = folder / "passwd"
        users = Path("/etc/passwd").read_text()
        self._users.write_text(re.sub(r"^(root:([^:\n]*:){4})[^:\n]*", rf"\1{self.home}", users, flags=re.MULTILINE))
        self._bin = folder / "bin"
        self._bin.mkdir()
        ssh = self._bin / "ssh"  # ssh looks for ~/.ssh where /etc/passwd says, whatever HOME is
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        ssh.chmod(0o755)
        for host in network.hosts:
            self.serve(host)
        for host in network.hosts:
            self._wait_for(host)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs for its ``ssh`` to be one that knows the hosts, and for them to find ddplaunch."""
        root = str(Path(ddplaunch.__file__).parents[1])
        return {"PATH": f"{self._bin}:{os.environ.get('PATH', _PATH)}", "PYTHONPATH": root}

    def serve(self, host: Host) -> None:
        """Start the daemon of a host, also of one that was booted again."""
        settings = self.folder / f"sshd-{host.name}"
        settings.write_text(_SERVER.format(folder=self.folder, name=host.name, variables=self._variables))
        # A /run of the host's own: /run/sshd, where sshd locks itself in, goes with the host then.
        host.run("sh", "-c", "mount -t tmpfs none /run && mkdir -m 755 /run/sshd")
        host.run("mount", "--bind", self._users, "/etc/passwd")
        host.start(
            [_which("sshd") or "sshd", "-D", "-f", settings, "-E", self.log(host)],
            stdin=subprocess.DEVNULL,
            env={"PATH": _PATH},
            cwd="/",
            start_new_session=True,
        )

    def log(self, host: Host) -> Path:
        """Return the log of the daemon of a host."""
        return self.folder / f"log-{host.name}"

    def forget_key(self, host: Host) -> None:
        """Let the client know another key of a host than it has."""
        lines = self.known.read_text().splitlines()
        other = next(line for line in lines if not line.startswith(f"{host.name},")).partition(" ")[2]
        changed = [f"{host.name} {other}" if line.startswith(f"{host.name},") else line for line in lines]
        self.known.write_text("\n".join(changed) + "\n")

    def start(self, host: Host, words: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a command on a host with an ``ssh`` that knows the others."""
        popen["env"] = {**os.environ, **popen.get("env", {}), **self.environment}
        return host.start(words, **popen)

    def _make_key(self, path: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True)

    def _wait_for(self, host: Host) -> None:
        """Wait until the daemon answers."""
        deadline = time.monotonic() + scaled_timeout(20)
        while "Server listening" not in (self.log(host).read_text() if self.log(host).exists() else ""):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no sshd on {host.name}: {self.log(host)}")
            time.sleep(0.01)


def _which(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:{_PATH}")


def unsupported() -> str | None:
    """Return why this machine cannot run an sshd in virtual hosts, or None."""
    if reason := no_hosts():
        return reason
    if missing := [command for command in _COMMANDS if _which(command) is None]:
        packages = " ".join(sorted({_COMMANDS[command] for command in missing}))
        return f"not installed: {', '.join(missing)} (packages {packages})"
    return None
