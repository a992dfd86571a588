"""A switch and the virtual hosts on it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Literal

from tests.tools.virtual_hosts.cable import Cable
from tests.tools.virtual_hosts.host import Host
from tests.tools.virtual_hosts.namespaces import HostError, NetworkNamespace

_SWITCH = "10.77.0.1"
"""The gateway of the hosts, which forwards nothing: packets to other networks are lost."""
_NAME_SERVER = "10.77.0.2"
"""No host has this address, but the hosts have a permanent ARP entry for it, so that they wait for an answer."""


class Network:
    """``count`` hosts n0, n1, … on a switch, which are up when this returns; a context manager.

    ``debian_hosts``: /etc/hosts begins with the host's own name at 127.0.1.1, as Debian's installer writes it.
    ``dns``: "files" resolves names from /etc/hosts only, "dead" also asks a name server that never answers.
    ``ipv6``: whether it is enabled on the hosts. ``second``: whether each host also has an eth1.
    """

    def __init__(
        self,
        count: int,
        *,
        debian_hosts: bool = False,
        dns: Literal["files", "dead"] = "files",
        ipv6: bool = True,
        second: bool = False,
    ) -> None:
        self.hosts: list[Host] = []
        self._switch = NetworkNamespace()
        try:
            self._switch.sysctl("ipv6/conf/all/disable_ipv6", "1")
            for bridge in ("br0", "br1"):
                self._switch.ip(
                    f"link add {bridge} type bridge forward_delay 0 mcast_snooping 0", f"link set {bridge} up"
                )
            self._switch.ip(f"address add {_SWITCH}/24 dev br0")
            for i in range(count):
                self.hosts.append(
                    Host(
                        f"n{i}",
                        (f"10.77.0.{10 + i}", f"fd77::{10 + i}" if ipv6 else "", f"10.78.0.{10 + i}" if second else ""),
                        _make_files(i, count, debian_hosts, dns, ipv6),
                        _make_cables(self._switch, i, ipv6, second),
                        ipv6,
                    )
                )
            for host in self.hosts:
                host.begin_boot()
            for host in self.hosts:
                host.finish_boot()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill and remove all hosts; may be called again."""
        for host in self.hosts:
            host.close()
        self._switch.close()


def _make_cables(switch: NetworkNamespace, number: int, ipv6: bool, second: bool) -> list[Cable]:
    """Make the cables of a host, whose MAC addresses are the same after each boot, as neighbours cache them."""
    settings = [
        f"address replace 10.77.0.{10 + number}/24 dev eth0",
        f"route replace default via {_SWITCH} dev eth0",
        f"neighbour replace {_NAME_SERVER} lladdr 02:77:00:00:00:02 dev eth0 nud permanent",
    ]
    if ipv6:
        settings.append(f"address replace fd77::{10 + number}/64 dev eth0")
    cables = [Cable(switch, "br0", f"n{number}", "eth0", f"02:77:00:00:01:{number:02x}", settings)]
    if second:
        settings = [f"address replace 10.78.0.{10 + number}/24 dev eth1"]
        cables.append(Cable(switch, "br1", f"n{number}-2", "eth1", f"02:78:00:00:01:{number:02x}", settings))
    return cables


def _make_files(number: int, count: int, debian_hosts: bool, dns: str, ipv6: bool) -> dict[str, str]:
    """Make the files of a host's /etc."""
    lines = ["127.0.0.1 localhost"]
    if debian_hosts:
        lines.append(f"127.0.1.1 n{number}.example n{number}")
    lines += [f"10.77.0.{10 + i} n{i}" for i in range(count)]
    if ipv6:
        lines.append("::1 localhost ip6-localhost ip6-loopback")
        lines += [f"fd77::{10 + i} n{i}" for i in range(count)]
    sources = "files dns" if dns == "dead" else "files"
    switch = Path("/etc/nsswitch.conf").read_text()
    files = {
        "/etc/hosts": "\n".join(lines) + "\n",
        "/etc/nsswitch.conf": re.sub(r"(?m)^hosts:.*$", f"hosts: {sources}", switch),
    }
    if Path("/etc/hostname").exists():
        files["/etc/hostname"] = f"n{number}\n"
    if dns == "dead":
        files["/etc/resolv.conf"] = f"nameserver {_NAME_SERVER}\n"
    return files


@functools.cache
def unsupported() -> str | None:
    """Return why this machine cannot have virtual hosts, or None; tested once."""
    if sys.platform != "linux":
        return "they need Linux namespaces"
    if os.geteuid() != 0:
        return "they need root"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2 and nftables)"
    try:
        with Network(1) as network:
            network.hosts[0].drop()
            network.hosts[0].reject()
            network.hosts[0].run("true")
    except (OSError, HostError) as error:
        return f"{type(error).__name__}: {error}"
    return None
