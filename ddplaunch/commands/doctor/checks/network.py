"""The network of one machine: its interface toward node 0, its loopback; and its clock."""

from __future__ import annotations

import ctypes
import socket

from ddplaunch import TYPE_CHECKING
from ddplaunch.commands.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.commands.doctor.probe import REPLY_TIMEOUT_S, HelperProbe
from ddplaunch.control.route import NameLookup, find_interface
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.sysfs import read_int
from ddplaunch.wire.bounds import Count, Name, TextLine

if TYPE_CHECKING:
    from ddplaunch.commands.doctor.facts import NodeFacts

LOOPBACK_TIMEOUT_S = 2.0  # seconds for a connection that leaves no machine
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True)
class RouteToNodeZero:
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
class NetworkFacts:
    """Fields of ``NodeFacts``."""

    link: RouteToNodeZero | None = None
    link_error: TextLine | None = None
    loopback: TextLine | None = None
    clock_synchronised: bool | None = None


def _read(where: CheckContext) -> FactReader:
    probe = HelperProbe.of(read_network, where.node_zero_address)
    silent = NetworkFacts(link_error="the network could not be looked at")
    return lambda: vars(probe.read_result(NetworkFacts, 3 * REPLY_TIMEOUT_S) or silent)


def read_network(toward: str) -> NetworkFacts:
    """The way to node 0, if there are others, and to this machine itself."""
    link, error = _route(toward) if toward else (None, None)
    return NetworkFacts(link, error, _try_loopback(), _clock_synchronised())


def find_route(toward: str) -> RouteToNodeZero | None:
    """The interface that leads to an address."""
    found = HelperProbe.of(read_network, toward).read_result(NetworkFacts, 3 * REPLY_TIMEOUT_S)
    return found.link if found else None


def _route(toward: str) -> tuple[RouteToNodeZero | None, str | None]:
    """The interface that leads to an address, or why none does."""
    lookup = NameLookup(toward)
    if not lookup.wait(REPLY_TIMEOUT_S):
        return None, f"no name server has said in {REPLY_TIMEOUT_S:g} s what address {toward} has"
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
        name = find_interface(address)
        folder = f"/sys/class/net/{name}"
        speed = read_int(f"{folder}/speed") if name else None
        mtu = read_int(f"{folder}/mtu") if name else None
        return RouteToNodeZero(address, name, mtu, speed if speed and speed > 0 else None, there), None
    return None, f"{toward}: {error.strerror if error else 'no address'}"


def _try_loopback() -> str | None:
    """Why this machine cannot connect to itself, as ranks on it do; None where it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), LOOPBACK_TIMEOUT_S).close()
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


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.loopback:
        text = f"a connection to itself (127.0.0.1) {facts.loopback}, so nothing was measured there"
        hint = "let the firewall pass the interface lo: iptables -I INPUT -i lo -j ACCEPT"
        yield Finding(Severity.ERROR, name, text, hint)


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
    _find_problems,
    {"address": lambda facts: facts.link.address if facts.link else None, "interface": _link, "clock": _clock_row},
)
