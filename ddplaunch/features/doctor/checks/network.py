"""Check of the route to node 0, the loopback interface, and the clock synchronisation of one machine."""

from __future__ import annotations

import ctypes
import os
import socket

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.types import TextLine
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.node_facts import NetworkAddress, NodeFacts, RouteToNodeZero
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, HelperProbe
from ddplaunch.system.devices.sysfs import read_int
from ddplaunch.system.network.addresses import NameLookup, find_interface, list_networks
from ddplaunch.system.network.interface_variables import find_unknown_interfaces, read_network_variables

LOOPBACK_TIMEOUT_S = 2.0  # for a connection within the machine
_MAX_VALUE_CHARS = 200
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


class NetworkFacts(Struct, frozen=True):
    """The fields of ``NodeFacts`` on the network."""

    link: RouteToNodeZero | None = None
    link_error: TextLine | None = None
    loopback: TextLine | None = None
    clock_synchronised: bool | None = None
    networks: tuple[NetworkAddress, ...] = ()
    unknown_interfaces: tuple[TextLine, ...] = ()
    network_variables: tuple[tuple[TextLine, TextLine], ...] = ()


def _read(context: CheckContext) -> FactReader:
    probe = HelperProbe.for_function(read_network, context.node_zero_address)
    silent = NetworkFacts(link_error="the network check timed out")
    return lambda: asdict(probe.read_result(NetworkFacts, 3 * REPLY_TIMEOUT_S) or silent)


def read_network(toward: str) -> NetworkFacts:
    """Read the route to node 0, if there are several nodes, the networks, and the clock state; test the loopback."""
    link, error = _find_route(toward) if toward else (None, None)
    networks = tuple(NetworkAddress(*each) for each in list_networks())
    unknown = tuple(map(_shorten, find_unknown_interfaces(os.environ)))
    variables = tuple((_shorten(name), _shorten(value)) for name, value in read_network_variables(os.environ).items())
    return NetworkFacts(link, error, _try_loopback(), _is_clock_synchronised(), networks, unknown, variables)


def _shorten(text: str) -> str:
    return sanitize_line(text[:_MAX_VALUE_CHARS])


def find_route(toward: str) -> RouteToNodeZero | None:
    """Find the route to an address, in a helper process."""
    found = HelperProbe.for_function(read_network, toward).read_result(NetworkFacts, 3 * REPLY_TIMEOUT_S)
    return found.link if found else None


def _find_route(toward: str) -> tuple[RouteToNodeZero | None, str | None]:
    """Return the route to an address, or why there is none."""
    lookup = NameLookup(toward)
    if not lookup.wait(REPLY_TIMEOUT_S):
        return None, f"the name {toward} was not resolved within {REPLY_TIMEOUT_S:g} s"
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
    """Return why this machine cannot connect to itself, as its ranks do; None if it can."""
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


def _is_clock_synchronised() -> bool | None:
    """Whether the kernel says that the clock is synchronised with a time server (adjtimex(2)); None if unknown."""
    try:
        timex = (ctypes.c_char * 512)()  # struct timex; its first field, what to change, is 0: nothing
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.loopback:
        text = f"a connection to itself (127.0.0.1) {facts.loopback}; no measurement on this machine"
        hint = "allow the interface lo in the firewall: iptables -I INPUT -i lo -j ACCEPT"
        yield Finding(Severity.ERROR, name, text, hint)
    for variable in facts.unknown_interfaces:
        hint = "`ip -brief link` lists those of the machine"
        yield Finding(Severity.ERROR, name, f"{variable}: no such interface", hint)


def _link(facts: NodeFacts) -> str | None:
    if facts.link is None:
        return None
    speed = f", {facts.link.speed} Mbit/s" if facts.link.speed else ""
    return f"{facts.link.interface or 'no interface'}, MTU {facts.link.mtu or 'unknown'}{speed}"


def _clock_row(facts: NodeFacts) -> str | None:
    if facts.clock_synchronised is None:
        return None
    return "synchronised (NTP)" if facts.clock_synchronised else "not synchronised (no NTP)"


CHECK = HealthCheck(
    _read,
    _find_problems,
    {"address": lambda facts: facts.link.address if facts.link else None, "interface": _link, "clock": _clock_row},
)
