"""Reserves a TCP port of this node, for the store or the control port, before any process learns its number."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

from ddplaunch.base.errors import UsageError, sanitize_line, truncate_line
from ddplaunch.system.network.addresses import parse_address, resolve
from ddplaunch.system.plan.rendezvous import LOOPBACK

LISTEN_BACKLOG = 65535  # the kernel limits it (net.core.somaxconn): all nodes may connect at once
CLAIM_TRIES, CLAIM_DELAY_S = 4, 0.02  # only a launcher on node 0's machine waits so long


class ReservedPort:
    """A port reserved for the lifetime of the job.

    A socket listens there from the start, so that no other program can bind it; connections wait in its queue. It is
    closed so that rank 0 can listen instead. A second socket stays open, and does not listen: ``bind_reusable``.
    """

    def __init__(self, address: str, number: int, *, nnodes: int, option: str = "--master-port") -> None:
        """Bind ``number``, or any free port where it is 0, on loopback or, with peers elsewhere, on all interfaces.

        Raises UsageError if it is taken, or ``address`` does not resolve; ``option`` is the option that names this
        port.
        """
        self._flag = option
        self._family, self._host = _choose_bind_address(address) if nnodes == 1 else _wildcard_address()
        self._reserved = self._bind(number)
        self.number: int = self._reserved.getsockname()[1]
        self._listening: socket.socket | None = None
        try:
            self.listen()
        except UsageError:
            self.close()
            raise

    def listen(self) -> socket.socket:
        """Return the listening socket, a new one after ``cede``.

        Raises UsageError if another program listens there now.
        """
        if self._listening is None:
            listening = self._bind(self.number)
            try:
                listening.listen(LISTEN_BACKLOG)
            except OSError as error:
                listening.close()
                raise _port_in_use_error(self._flag, self.number, error) from None
            self._listening = listening
        return self._listening

    def stop_listening(self) -> None:
        """Close the listening socket so that another process (rank 0) can listen on the port.

        A child that is being started may still have a copy of it, as the kernel closes those late in execve(2); so it
        is shut down, which ends the listening of all copies.
        """
        if self._listening is not None:
            with suppress(OSError):  # not Linux
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            self._listening = None

    def close(self) -> None:
        """Close the sockets; a copy of the listening one in another process stays open."""
        if self._listening is not None:
            self._listening.close()
        self._reserved.close()

    def _bind(self, number: int) -> socket.socket:
        try:
            return bind_reusable(self._family, self._host, number)
        except OSError as error:
            raise _port_in_use_error(self._flag, number, error) from None


def bind_reusable(family: socket.AddressFamily, host: str, number: int) -> socket.socket:
    """Return a socket bound with SO_REUSEADDR that does not listen; an IPv6 socket accepts IPv4 too.

    It keeps the kernel from choosing the port for other programs, and allows another socket with SO_REUSEADDR to listen
    (Linux, tcp(7)). Raises OSError.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, number))
    except OSError:
        sock.close()
        raise
    return sock


def try_listen(number: int) -> socket.socket | None:
    """Listen on all interfaces; None if another process listens there already. One of several callers succeeds.

    Any number of sockets may be bound with SO_REUSEADDR; the kernel lets one of them listen. It refuses both of two
    that try at the same moment, and a program that only tests the port holds it for a moment: so this tries again.
    """
    for tries in range(CLAIM_TRIES):
        if tries:  # not all after the same time
            time.sleep((1 + os.getpid() % 16 / 16) * CLAIM_DELAY_S)
        try:
            return listen_on_all_interfaces(number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _port_in_use_error("--control-port", number, error) from None
    return None


def listen_on_all_interfaces(number: int) -> socket.socket:
    """Listen on all interfaces. Raises OSError."""
    family, host = _wildcard_address()
    dual = family == socket.AF_INET6
    return socket.create_server((host, number), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=dual)


def loopback_note() -> str | None:
    """Return an error text if 127.0.0.1 is unreachable, as in a new network namespace, else None.

    torch would retry for two minutes. A UDP socket that is connected sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((LOOPBACK, 9))
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
                return f"the loopback interface is down: no rank can reach {LOOPBACK}; type: ip link set lo up"
    return None


def _choose_bind_address(address: str) -> tuple[socket.AddressFamily, str]:
    if address == LOOPBACK:
        return socket.AF_INET, address
    try:
        resolved = resolve(address)
    except OSError as error:
        why = f"--master-addr {sanitize_line(address)} does not resolve: {error.strerror}"
        raise UsageError(why, "give an address, like 10.0.0.1") from None
    addresses = [(family, str(where[0])) for family, where in resolved]
    if all(parse_address(each).is_loopback for _, each in addresses):
        return next((each for each in addresses if each[0] == socket.AF_INET), addresses[0])
    if not any(_can_bind(*each) for each in addresses):
        why = f"--master-addr {address} is not an address of this machine, where rank 0 runs"
        raise UsageError(why, "leave it out on one node")
    return _wildcard_address()


def _wildcard_address() -> tuple[socket.AddressFamily, str]:
    has_ipv6 = socket.has_ipv6 and _can_bind(socket.AF_INET6, "::")
    return (socket.AF_INET6, "::") if has_ipv6 else (socket.AF_INET, "0.0.0.0")


def _can_bind(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


class PortTaken(UsageError):
    """Another program listens on a port that node 0 needs."""


def _port_in_use_error(flag: str, number: int, error: OSError) -> UsageError:
    if error.errno == errno.EACCES:
        return UsageError(f"{flag} {number}: only root may use ports below 1024", f"{flag} 29500")
    if error.errno != errno.EADDRINUSE:
        return UsageError(f"{flag} {number} cannot be bound: {error.strerror}")
    hint = "leave --master-port out on one node, or give another"
    if flag == "--control-port":
        hint = "give every node another --master-port, which the control port follows, or another --control-port"
    return PortTaken(f"{flag} {number} is in use by {describe_listener(number)}", hint)


def describe_listener(number: int) -> str:
    """Describe the process that listens on the port, if the kernel shows it; it hides those of other users."""
    with suppress(Exception):
        import psutil

        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == number and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline()) or process.name()
                return f"{truncate_line(command, 60)} (pid {process.pid}, {process.username()})"
    return "another process"
