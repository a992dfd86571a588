"""The network of one machine: its interface toward node 0, its loopback; and its clock."""

from __future__ import annotations

import ctypes
import socket

from ddplaunch import TYPE_CHECKING
from ddplaunch.commands.doctor.checks import Found, HealthCheck, Reading, Severity, Surroundings, Symptom
from ddplaunch.commands.doctor.probe import DEADLINE, Probe
from ddplaunch.control.route import Lookup, interface_of
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.sysfs import read_int
from ddplaunch.wire.bounds import Count, Line, Name

if TYPE_CHECKING:
    from ddplaunch.commands.doctor.facts import NodeFacts

LOOPBACK_DEADLINE = 2.0  # seconds for a connection that leaves no machine
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True)
class Link:
    """How this machine would reach node 0, or be reached as node 0."""

    address: Name
    interface: Name | None
    mtu: Count | None = None
    speed: Count | None = None  # megabits a second, as the driver says
    there: Name = ""  # the address that node 0 has from here

    @property
    def loopback(self) -> bool:
        """Whether it leads to this machine itself."""
        return self.address.startswith("127.") or self.address == "::1"


@dataclass(frozen=True)
class NetworkFound:
    """Fields of ``NodeFacts``."""

    link: Link | None = None
    link_error: Line | None = None
    loopback: Line | None = None
    clock_synchronised: bool | None = None


def _read(where: Surroundings) -> Reading:
    probe = Probe.of(find, where.toward)
    silent = NetworkFound(link_error="the network could not be looked at")
    return lambda: vars(probe.answer(NetworkFound, 3 * DEADLINE) or silent)


def find(toward: str) -> NetworkFound:
    """The way to node 0, if there are others, and to this machine itself."""
    link, error = _route(toward) if toward else (None, None)
    return NetworkFound(link, error, _try_loopback(), _clock_synchronised())


def route(toward: str) -> Link | None:
    """The interface that leads to an address."""
    found = Probe.of(find, toward).answer(NetworkFound, 3 * DEADLINE)
    return found.link if found else None


def _route(toward: str) -> tuple[Link | None, str | None]:
    """The interface that leads to an address, or why none does."""
    lookup = Lookup(toward)
    if not lookup.wait(DEADLINE):
        return None, f"no name server has said in {DEADLINE:g} s what address {toward} has"
    if lookup.error or not lookup.addresses:
        return None, f"the name {toward} does not resolve"
    error: OSError | None = None
    for family, where in lookup.addresses:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((where[0], 9, *where[2:]))  # sends nothing
                address, there = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        except OSError as refused:
            error = refused
            continue
        name = interface_of(address)
        folder = f"/sys/class/net/{name}"
        speed = read_int(f"{folder}/speed") if name else None
        mtu = read_int(f"{folder}/mtu") if name else None
        return Link(address, name, mtu, speed if speed and speed > 0 else None, there), None
    return None, f"{toward}: {error.strerror if error else 'no address'}"


def _try_loopback() -> str | None:
    """Why this machine cannot connect to itself, as ranks on it do; None where it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), LOOPBACK_DEADLINE).close()
    except TimeoutError:
        return "gets no answer"
    except ConnectionRefusedError:
        return "is refused"
    except OSError as error:
        return f"fails: {error.strerror}"
    return None


def _clock_synchronised() -> bool | None:
    """Whether the kernel knows of a time server that keeps the clock (adjtimex(2))."""
    try:
        timex = (ctypes.c_char * 512)()  # struct timex; its first field, what to change, is 0: nothing
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED


def _rule(name: str, facts: NodeFacts) -> Found:
    if facts.loopback:
        text = f"a connection to itself (127.0.0.1) {facts.loopback}, so nothing was measured there"
        hint = "let the firewall pass the interface lo: iptables -I INPUT -i lo -j ACCEPT"
        yield Symptom(Severity.ERROR, name, text, hint)


def _link(facts: NodeFacts) -> str | None:
    if facts.link is None:
        return None
    speed = f", {facts.link.speed} Mbit/s" if facts.link.speed else ""
    return f"{facts.link.interface or 'no interface'}, MTU {facts.link.mtu or 'unknown'}{speed}"


def _clock_row(facts: NodeFacts) -> str | None:
    if facts.clock_synchronised is None:
        return None
    return "kept by a time server" if facts.clock_synchronised else "not set by a time server, says the kernel"


CHECK = HealthCheck(
    _read,
    _rule,
    {"address": lambda facts: facts.link.address if facts.link else None, "interface": _link, "clock": _clock_row},
)
