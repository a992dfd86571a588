"""One virtual host: its processes, its power, and the faults of its network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.cable import Cable, wait_for_ready
from tests.tools.virtual_hosts.freezer import freeze, send_signal
from tests.tools.virtual_hosts.namespaces import (
    FS,
    HOST,
    HostError,
    NetworkNamespace,
    current_network,
    in_thread,
    setns,
    unshare,
)

_INIT = Path(__file__).with_name("init.py")


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for a command, assert its exit code, and return its stdout and stderr."""
    out, err = process.communicate(timeout=scaled_timeout(120))
    assert process.returncode == code, f"{out}{err}"
    return out, err


class Host:
    """A machine of a :class:`~tests.tools.virtual_hosts.network.Network`, which makes it."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        files: dict[str, str],
        cables: Sequence[Cable],
        ipv6: bool,
    ) -> None:
        """``addresses``: IPv4, IPv6 and that of the second interface. ``files``: replace those of /etc, by path."""
        self.name = name
        self.address, self.address6, _ = addresses
        self._addresses, self._files, self._cables, self._ipv6 = addresses, files, cables, ipv6
        self.cable = cables[0]
        """The cable of eth0."""
        self._init: subprocess.Popen[bytes] | None = None
        self._network = NetworkNamespace(-1)  # of the last boot
        self._started: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    # Processes

    def start(self, words: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a command on the host, as ``subprocess.Popen`` does: a child with this environment, cwd and terminal.

        It has the process group of the test too, so both get a Ctrl-C, and it ends with the host, which ends with the
        test process. By default its temporary files are removed with the host: power_off gives it no time to do that,
        and in a shared folder several hosts would have the same names and pids.
        """
        init = self._require_init()
        popen["env"] = environ = dict(popen.get("env") or os.environ)
        if environ.get("TMPDIR") == os.environ.get("TMPDIR"):
            environ["TMPDIR"] = "/dev/shm"
        if environ.get("XDG_RUNTIME_DIR") == os.environ.get("XDG_RUNTIME_DIR"):
            environ["XDG_RUNTIME_DIR"] = "/dev/shm"  # where the jobs of other hosts are not visible
        popen["cwd"] = Path(popen.get("cwd") or ".").absolute()

        def begin() -> subprocess.Popen[Any]:
            fd = os.pidfd_open(init.pid)
            try:
                unshare(FS)
                setns(fd, HOST)
            finally:
                os.close(fd)
            return subprocess.Popen([str(word) for word in words], **popen)

        self._started.append(in_thread(begin))
        return self._started[-1]

    def type(
        self, words: Sequence[str | Path], cwd: Path, env: Mapping[str, str], stdin: int | IO[str] = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Start a command as a user types it, with these variables and with pipes for what it prints."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.start(words, cwd=cwd, env=env, stdin=stdin, **pipes)

    def run(self, *words: str | Path, check: bool = True, **popen: Any) -> str:
        """Run a command on the host to its end and return its stdout."""
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
        out, err = process.communicate()
        if check and process.returncode:
            raise HostError(f"{words} on {self.name}: exit status {process.returncode}\n{out}{err}")
        return str(out)

    def processes(self) -> list[int]:
        """The pids, as seen from outside, of all its live processes but its init."""
        if not self.alive or self._init is None:
            return []
        namespace = os.stat(f"/proc/{self._init.pid}/ns/pid").st_ino
        found = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            try:
                here = os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace
                state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue  # it ended
            if here and pid != self._init.pid and state not in (b"Z", b"X"):
                found.append(pid)
        return found

    def find(self, pattern: str) -> list[int]:
        """List its processes whose command line, joined by spaces, matches a regular expression."""
        found = []
        for pid in self.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
            except OSError:
                continue  # it ended
            if re.search(pattern, line.decode(errors="replace")):
                found.append(pid)
        return found

    # Power

    @property
    def alive(self) -> bool:
        """Whether it is up: whether its init runs."""
        return self._init is not None and self._init.poll() is None

    def boot(self) -> None:
        """Switch it on, without faults of its cables."""
        self.begin_boot()
        self.finish_boot()

    def begin_boot(self) -> None:
        """The part of :meth:`boot` that does not wait, so that several hosts boot at the same time."""
        if self.alive:
            raise HostError(f"{self.name} is up already")
        # First the cables: the kernel may remove a network without holders, with its ends of the cables, at any time.
        for cable in self._cables:
            cable.pull()
        self._network.close()
        self._init, self._network = in_thread(self._start_init)
        # Without duplicate address detection the hosts' link-local addresses can be used at once.
        setting, value = ("accept_dad", "0") if self._ipv6 else ("disable_ipv6", "1")
        for devices in ("all", "default"):
            self._network.sysctl(f"ipv6/conf/{devices}/{setting}", value)
        self._network.ip("link set lo up")
        for cable in self._cables:
            cable.plug(self._network, self._init.pid)

    def finish_boot(self) -> None:
        """Wait until the host is up."""
        assert self._init is not None
        wait_for_ready(self._init, f"the init of {self.name}")

    def _start_init(self) -> tuple[subprocess.Popen[bytes], NetworkNamespace]:
        test_process = os.pidfd_open(os.getpid())
        unshare(HOST)
        network = NetworkNamespace(current_network())
        settings = {"hostname": self.name, "files": self._files, "test_process": test_process}
        try:
            init = subprocess.Popen(
                [sys.executable, "-IS", str(_INIT), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[test_process],
                start_new_session=True,
            )
        except BaseException:
            network.close()
            raise
        finally:
            os.close(test_process)
        return init, network

    def power_off(self) -> None:
        """Cut the cables, then kill all processes: the other hosts receive nothing more from it."""
        for cable in self._cables:
            cable.cut()
        self.kill_all()

    def kill_all(self) -> None:
        """Kill all processes, by killing init. The network stays, and the kernel closes the connections."""
        if self._init is not None:
            self._init.kill()
            for process in self._started:
                process.wait()  # init exits only when its namespace has no process left, not even a zombie
            self._init.wait()
            self._started.clear()

    def close(self) -> None:
        """Remove the host."""
        self.kill_all()
        for cable in self._cables:
            cable.close()
        self._network.close()

    def freeze(self) -> None:
        """Stop all its processes, so that only the kernel of the host responds."""
        self._require_init()
        freeze(self.processes)

    def thaw(self) -> None:
        """Let its processes run again."""
        send_signal(signal.SIGCONT, self.processes())

    def _require_init(self) -> subprocess.Popen[bytes]:
        if not self.alive or self._init is None:
            raise HostError(f"{self.name} is not up")
        return self._init

    # Faults in the switch and the firewall; those of the first interface are its cable's

    def loss(self, percent: float) -> None:
        """Drop a percentage of the frames in each direction, at random."""
        lost = f"numgen random mod 10000 < {round(percent * 100)} drop"
        self._filter([f"{way} {self.cable.port} {lost}" for way in ("iifname", "oifname")])

    def drop(self, peer: Host | None = None) -> None:
        """Drop all IP packets to and from it in the switch, or those that it exchanges with one peer."""
        if peer is None:
            kinds = {"iifname": ["meta protocol { ip, ip6 }"], "oifname": ["meta protocol { ip, ip6 }"]}
        else:
            addresses = [("ip6" if ":" in address else "ip", address) for address in peer._addresses if address]
            kinds = {
                "iifname": [f"{family} daddr {address}" for family, address in addresses],
                "oifname": [f"{family} saddr {address}" for family, address in addresses],
            }
        self._drop((way, what) for way, whats in kinds.items() for what in whats)

    def drop_port(self, port: int) -> None:
        """Drop packets from or to a TCP port, on either side, in the switch."""
        ends = [f"tcp {end} {port}" for end in ("sport", "dport")]
        self._drop((way, end) for way in ("iifname", "oifname") for end in ends)

    def drop_large(self, peer: Host, length: int = 1400) -> None:
        """Drop IP packets of more than ``length`` bytes from it to one peer in the switch, without an ICMP error."""
        to = ["ip6 daddr" if ":" in address else "ip daddr" for address in peer._addresses if address]
        ends = zip(to, filter(None, peer._addresses), strict=True)
        self._filter([f"iifname {self.cable.port} {end} {it} meta length > {length} drop" for end, it in ends])

    def _drop(self, rules: Iterable[tuple[str, str]]) -> None:
        # Neighbour discovery still works, as ARP does for IPv4, which is not IP: both fail silently.
        neighbours = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept"
        ports = "{ " + ", ".join(cable.port for cable in self._cables) + " }"
        self._filter([neighbours, *(f"{way} {ports} {what} drop" for way, what in rules)])

    def _filter(self, rules: Sequence[str]) -> None:
        """Add firewall rules to the switch."""
        chain = f"bridge faults-{self.name} forward"
        self.cable.switch.nft(
            f"add table bridge faults-{self.name}\n"
            f"add chain {chain} {{ type filter hook forward priority 0; }}\n"
            + "".join(f"add rule {chain} {rule}\n" for rule in rules)
        )

    def reject(self) -> None:
        """Answer all TCP packets, in both directions, with a reset, in the host's own firewall."""
        # Except resets, as those for a peer have to leave the host.
        self._network.nft(
            "table inet faults {\n"
            "chain in { type filter hook input priority -300; }\n"
            "chain out { type filter hook output priority -300; }\n"
            "}\n"
            "add rule inet faults in iifname != lo meta l4proto tcp reject with tcp reset\n"
            "add rule inet faults out oifname != lo tcp flags & rst == 0 reject with tcp reset\n"
        )

    def drop_loopback(self) -> None:
        """Drop what it sends to itself, in the host's own firewall."""
        self._network.nft(
            "table inet faults { chain in { type filter hook input priority -300; iifname lo drop; }; }\n"
        )

    def heal(self) -> None:
        """Undo all faults of the network."""
        # "add" first, since only a table that exists can be deleted.
        table = f"bridge faults-{self.name}"
        self.cable.switch.nft(f"add table {table}\ndelete table {table}\n")
        self._network.nft("add table inet faults\ndelete table inet faults\n")
        for cable in self._cables:
            cable.heal()
