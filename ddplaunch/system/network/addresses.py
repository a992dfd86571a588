"""Network addresses, interfaces and name look-ups of this machine; reverse look-ups only in ``ReverseLookupCheck``."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

from ddplaunch.base.errors import UsageError, sanitize_line

RESOLVE_TIMEOUT_S = 5.0  # for the check of node 0's own name; without an answer it is skipped
REVERSE_LOOKUP_TIMEOUT_S = 0.5  # a slower name server makes ranks use RESOLVER_OPTIONS

RESOLVER_OPTIONS = "timeout:1 attempts:1"
"""RES_OPTIONS (resolv.conf(5)) of ranks whose name server does not answer: 1 s a look-up, the least there is."""

SocketAddress = tuple[socket.AddressFamily, tuple[str, int]]  # as sockets take it
SocketAddresses = list[SocketAddress]  # those of a name
InterfaceAddresses = dict[str, list[str]]  # by interface; link-local IPv6 with its zone: "fe80::1%eth0"


def _read_interfaces() -> dict[str, list[Any]]:
    import psutil  # 6 ms that few starts need

    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    return interfaces


def list_interface_addresses() -> InterfaceAddresses:
    found: InterfaceAddresses = {}
    for name, addresses in _read_interfaces().items():
        literals = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        if literals:
            found[name] = literals
    return found


def list_networks() -> Iterator[tuple[str, str, str]]:
    """List the networks of this machine, without loopback: interface, address and network, "10.0.0.0/24"."""
    for name, addresses in _read_interfaces().items():
        if os.path.exists(f"/sys/class/net/{name}/bridge"):  # of containers
            continue
        for interface in addresses:
            if interface.family in (socket.AF_INET, socket.AF_INET6) and interface.netmask:
                address, bits = (
                    parse_address(interface.address),
                    int(ipaddress.ip_address(interface.netmask)).bit_count(),
                )
                if not (address.is_loopback or address.is_link_local):
                    network = ipaddress.ip_network(f"{address}/{bits}", strict=False)
                    yield name, str(address), str(network)


def machine_id() -> str:
    """Return an id of this machine, or of this container (its network and PID namespaces)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid"))])
    except OSError:
        return ""


def find_interface(address: str) -> str | None:
    """The name of the interface that has ``address``; None if none has it, or ``address`` is empty."""
    if not address:
        return None
    wanted = parse_address(address)
    interfaces = list_interface_addresses().items()
    return next((name for name, found in interfaces if wanted in map(parse_address, found)), None)


def check_interface(interface: str) -> None:
    """Raise a UsageError where this machine has no such interface."""
    if interface not in (found := list_interface_addresses()):
        why = f"--interface {interface}: this machine has no such interface"
        raise UsageError(why, f"it has {_format_interfaces(found)}")


def find_address(interface: str, family: socket.AddressFamily) -> str | None:
    """An address of an interface; None if it has no address of this family."""
    found = list_interface_addresses().get(interface, ())
    return next((each for each in found if (":" in each) is (family == socket.AF_INET6)), None)


def parse_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _format_interfaces(found: InterfaceAddresses) -> str:
    return ", ".join(f"{addresses[0]} ({name})" for name, addresses in found.items() if name != "lo") or "only loopback"


def check_local_address(address: str) -> None:
    """Raise a UsageError where ``address`` does not resolve, or is not one of this machine, which is node 0.

    If the name server does not answer, the check passes: the other nodes will find out.
    """
    if is_local_address(address) is False:
        has = _format_interfaces(list_interface_addresses())
        raise UsageError(
            f"--master-addr {address} is not an address of this machine, which is node 0: it has {has}",
            "give one of those here, and elsewhere the address at which this machine is reached;\n"
            "or, if this is another node, its own --node-rank",
        )


def is_local_address(address: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> bool | None:
    """Whether ``address`` is one of this machine; None where no name server answers in ``timeout_s`` seconds.
    Raises UnresolvableName if no name server knows it.
    """
    lookup = NameLookup(address)
    is_done = lookup.wait(timeout_s)
    lookup.close()
    if not is_done or (lookup.error and lookup.error.errno == socket.EAI_AGAIN):
        return None
    if lookup.error:
        raise unresolvable_error(address)
    local = {parse_address(each) for addresses in list_interface_addresses().values() for each in addresses}
    found = {parse_address(str(where[0])) for _, where in lookup.addresses}
    return any(each in local or each.is_loopback for each in found)


class UnresolvableName(UsageError):
    """Raised for a host name that does not resolve, or not yet."""


def unresolvable_error(address: str) -> UnresolvableName:
    message = f"--master-addr {sanitize_line(address)} does not resolve on this machine"
    return UnresolvableName(message, "give node 0's address, like 10.0.0.1")


def resolve(address: str, port: int | None = None) -> SocketAddresses:
    """Look up the addresses of a host name, without a timeout of its own.

    Raises OSError if it is unknown, or the name server does not answer; also where it cannot be a name at all, for
    which ``socket.getaddrinfo`` has two more exceptions: labels of over 63 letters (RFC 1035), and NUL.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except ValueError:  # UnicodeError, of the idna codec, is one too
        raise OSError(socket.EAI_NONAME, "Name or service not known") from None
    return [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]  # IPv6 has two numbers more


class NameLookup:
    """A look-up of a host name in its own thread, because the C library's function cannot be interrupted or polled."""

    def __init__(self, address: str, port: int | None = None) -> None:
        self._read, write = os.pipe()
        self.addresses: SocketAddresses = []
        self.error: OSError | None = None

        def look_up() -> None:
            try:
                self.addresses = resolve(address, port)
            except OSError as error:
                self.error = error
            os.close(write)

        self._thread = Thread(target=look_up, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the look-up to end; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the look-up has ended."""
        return self._read

    def close(self) -> None:
        os.close(self._read)


class ReverseLookupCheck:
    """Checks in a thread whether the name server answers reverse look-ups.

    torch's TCPStore makes one for every connection (c10d/socket.cpp, to log it); a name server that does not answer
    costs 10 s each (resolv.conf(5): 5 s, 2 attempts).
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        """Start the check; ``notify`` is called at most once, with a message if the name server does not answer."""
        self._notify: Callable[[str], None] | None = notify
        self._started_at = time.monotonic()
        self._thread = Thread(target=self._query, daemon=True)
        self._thread.start()

    @staticmethod
    def _query() -> None:
        address = next(list_reachable_addresses(), "127.0.0.1")
        mapped = address if ":" in address else f"::ffff:{address}"  # as torch asks
        with suppress(OSError):  # an answer too
            socket.getnameinfo((mapped, 0, 0, 0), 0)

    def rank_environment(self) -> dict[str, str]:
        """Return a variable that shortens look-ups in ranks if the name server does not answer in time, else {}."""
        self._thread.join(max(0.0, self._started_at + REVERSE_LOOKUP_TIMEOUT_S - time.monotonic()))
        if not self._thread.is_alive():
            return {}
        if self._notify:
            waits = "set to 1 s, so that ranks do not wait 10 s for each peer"
            self._notify(f"the name server does not answer; its timeout in the ranks is {waits}")
            self._notify = None
        return {"RES_OPTIONS": RESOLVER_OPTIONS}


def list_reachable_addresses() -> Iterator[str]:
    """Yield the addresses of this machine that other machines may reach, IPv4 first."""
    found = [each for name, addresses in list_interface_addresses().items() if name != "lo" for each in addresses]
    usable = [each for each in found if not parse_address(each).is_link_local and not parse_address(each).is_loopback]
    yield from sorted(usable, key=lambda each: parse_address(each).version)
