"""Ports of programs, and the placeholders for their addresses: ``{port}``, ``{vllm}``, ``{vllm.host}``, ….

``{port}``, ``{host}`` and ``{address}`` are a program's own; ``{port.NAME}`` is another port of it. After the name of a
program these are ``{vllm.port}``, ``{vllm.host}``, ``{vllm.port.NAME}``; ``{vllm}`` alone is host and port. All other
braces stay as they are.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.base.text import closest_match
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.options import Nodes
from ddplaunch.features.programs.messages import HeldAddress
from ddplaunch.features.programs.placement import Instance, Placement
from ddplaunch.features.programs.spec import OWN_FIELDS, Programs, ProgramSpec
from ddplaunch.system.network.addresses import find_address, resolve
from ddplaunch.system.network.reserved_port import bind_reusable
from ddplaunch.system.plan.rendezvous import LOOPBACK

_FIELD = re.compile(r"\{([A-Za-z][\w-]*)((?:\.[A-Za-z][\w-]*){0,2})(?::([^{}]*))?\}")
ALL = "all"
"""The addresses of all processes of a program: ``{vllm.all}``, or ``{vllm.all:http://%/v1}`` with a form for each."""


ADDRESS_VARIABLE = "DDPLAUNCH_NAME_ADDRESS"
ADDRESSES_VARIABLE = "DDPLAUNCH_NAME_ADDRESSES"
"""The variable with all addresses of a program that has several processes."""
WORLD_PORT, WORLD_CONTROL_PORT = "master", "control"
"""Names of two ports of a program with ranks of its own on several nodes: for --master-port and --control-port."""


class Placeholder(NamedTuple):
    """A placeholder in a text."""

    text: str
    program: str
    what: str  # "port", "host", "address" or "all"
    port: str  # the name of the port; "" for the one without a name
    form: str = "%"  # of "all": of each address


def parse_placeholder(match: re.Match[str], own: str, names: Iterable[str]) -> Placeholder | None:
    """Return the placeholder that a field in braces stands for; None if the field is part of the user's text.

    ``own``: the program whose command has the field; "" for the ranks' program.
    """
    first, rest = str(match[1]), str(match[2]).split(".")[1:]
    if first in names and rest and rest[0] == ALL:
        return Placeholder(match[0], first, ALL, "".join(rest[1:]), match[3] or "%")
    if match[3] is not None:
        return None
    if first in names:
        what, *more = rest or ["address"]
        if what not in OWN_FIELDS or (more and what == "host"):
            hint = f"{{{first}}} is its address; {{{first}.host}} and {{{first}.port}} are parts of it"
            raise UsageError(f"{match[0]}: a program has an address, host and port, not {'.'.join(rest)}", hint)
        return Placeholder(match[0], first, what, more[0] if more else "")
    if own and first in OWN_FIELDS and len(rest) < 2 and not (rest and first == "host"):
        return Placeholder(match[0], own, first, rest[0] if rest else "")
    return None


def list_placeholders(programs: Programs) -> Iterator[tuple[ProgramSpec, Placeholder]]:
    """Yield all placeholders of programs beside the ranks. Raises UsageError for one that seems to be misspelt."""
    names = [each.name for each in (*programs.beside, programs.target)]
    for spec in programs.beside:
        for text in spec.texts:
            for match in _FIELD.finditer(text):
                if placeholder := parse_placeholder(match, spec.name, names):
                    yield spec, placeholder
                elif near := closest_match(match[1], [*names, *OWN_FIELDS]):
                    raise UsageError(f'{match[0]}: no program named "{match[1]}"', f"did you mean {{{near}}}?")


Addresses = Callable[[Placeholder], Sequence[tuple[str, int]]]
"""Returns host and port of the process that a placeholder names, or of all processes of the program."""


def fill_placeholders(text: str, own: str, names: Iterable[str], find_addresses: Addresses) -> str:
    """Replace the placeholders in a text."""

    def fill_field(found: re.Match[str]) -> str:
        if (placeholder := parse_placeholder(found, own, names)) is None:
            return found[0]
        addresses = find_addresses(placeholder)
        if placeholder.what == ALL:
            return ",".join(placeholder.form.replace("%", join_host_port(*each)) for each in addresses)
        host, number = addresses[0]
        return {"port": str(number), "host": host, "address": join_host_port(host, number)}[placeholder.what]

    return _FIELD.sub(fill_field, text)


def list_ports(programs: Programs, target_words: Iterable[str]) -> dict[tuple[str, str], int | None]:
    """Return all ports of programs beside the ranks: by program and name, with the number if it is fixed.

    Raises UsageError if a placeholder names a port that its program cannot know.
    """
    names = [each.name for each in (*programs.beside, programs.target)]
    used = [(spec.name, each) for spec, each in list_placeholders(programs)]
    for text in (*target_words, *programs.target.env.values()):
        used += [("", each) for found in _FIELD.finditer(text) if (each := parse_placeholder(found, "", names))]
    known = {(each.program, each.port) for own, each in used if own == each.program and each.what != "host"}
    ports: dict[tuple[str, str], int | None] = dict.fromkeys(sorted(known))
    for spec in programs.beside:
        if spec.is_world and spec.has_fixed_nodes:
            ports |= dict.fromkeys([(spec.name, WORLD_PORT), (spec.name, WORLD_CONTROL_PORT)])
        condition = spec.condition
        if condition.port is not None:
            ports[spec.name, ""] = condition.port
        elif condition.kind in ("tcp", "http") and (spec.name, "") not in ports:
            hint = f"write {{port}} where it takes its port, or name a fixed one: ready {condition.kind}:8000"
            raise UsageError(f"{spec.name}: ready {spec.ready} needs its port, and its command has no {{port}}", hint)
    for _, reference in used:
        if reference.what != "host" and (reference.program, reference.port) not in ports:
            field = f"{{port.{reference.port}}}" if reference.port else "{port}"
            what = f"{reference.text}: {reference.program} has no such port"
            raise UsageError(what, f"write {field} in the command of {reference.program}, where it takes its port")
    return ports


def join_host_port(host: str, number: int) -> str:
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def address_variable_name(program: str, port: str, variable: str = ADDRESS_VARIABLE) -> str:
    """Return the name of the variable with the address of a program, which all processes of the job have."""
    name = "_".join(filter(None, (program, port)))
    return variable.replace("NAME", name.upper().replace("-", "_"))


def find_own_address(config: JobConfig, node: int) -> str:
    """Return the address at which other nodes reach this one: that of its interface, or of its route to node 0."""
    if not config.address:
        return LOOPBACK
    if node == 0:
        return config.address
    interface = config.options[Nodes].interface
    if interface and (found := find_address(interface, socket.AF_INET) or find_address(interface, socket.AF_INET6)):
        return found
    with suppress(OSError):
        # Most servers listen on 0.0.0.0, which has no IPv6.
        for family, where in sorted(resolve(config.address, config.port), key=lambda each: each[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(where)  # sends nothing
                return str(sock.getsockname()[0])
    return host_name()


class ProgramAddresses:
    """The addresses of all programs as one node knows them, and the ports that it holds for its own."""

    def __init__(self, programs: Programs, placement: Placement, node: int, target_words: Iterable[str]) -> None:
        self._programs, self._placement, self._node, self._target_words = programs, placement, node, target_words
        self._names = [each.name for each in (*programs.beside, programs.target)]
        # Servers set SO_REUSEADDR, or a restart would have to wait for a minute: so they can listen on these ports.
        self._held: dict[tuple[str, str], socket.socket] = {}
        self._known: dict[tuple[str, str], tuple[str, int]] = {}  # by the names of instance and port
        self._host = ""

    def hold_ports(self, config: JobConfig) -> tuple[HeldAddress, ...]:
        """Hold the ports of all programs of this node, which they keep through all attempts."""
        self._host = host = self._host or find_own_address(config, self._node)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held: list[HeldAddress] = []
        ports = list_ports(self._programs, self._target_words)
        for instance in self._placement.on(self._node):
            own = {port: number for (program, port), number in ports.items() if program == instance.program}
            for port, number in ({"": 0} | own).items():  # of a program without a port, for {vllm.host}
                key = instance.spec.name, port
                if number is None and key not in self._held:
                    self._held[key] = bind_reusable(family, "" if config.address else LOOPBACK, 0)
                held.append(HeldAddress(*key, host, self._held[key].getsockname()[1] if number is None else number))
        if self._node == 0:
            held.append(HeldAddress(self._programs.target.name, "", host, 0))
        return tuple(held)

    def set_addresses(self, addresses: Iterable[HeldAddress]) -> None:
        self._known = {(each.program, each.port): (each.host, each.number) for each in addresses}

    def release_ports(self, name: str | None = None) -> None:
        """Stop holding the ports of the instance ``name``, or of all instances."""
        for (instance, _), held in self._held.items():
            if name in (None, instance):
                held.close()

    def of(self, instance: str, port: str = "") -> tuple[str, int]:
        """Return host and port of an instance of a program; the port is 0 if the program listens on none."""
        return self._known.get((instance, port), (LOOPBACK, 0))

    def format_address(self, instance: str) -> str:
        """Return the address of an instance as "host:port"; "" if the program has no port."""
        host, port = self.of(instance)
        return join_host_port(host, port) if port else ""

    def list_addresses(self) -> list[tuple[str, str, str, int]]:
        """Return program, name of the port, host and port of all processes beside the ranks."""
        return [
            (instance.program, port, *where)
            for instance in self._placement.instances
            for (name, port), where in self._known.items()
            if name == instance.spec.name
        ]

    def fill(self, text: str, own: Instance | None) -> str:
        """Replace the placeholders in a text of the instance ``own``; None: in a text of the ranks' program."""

        def find_addresses(placeholder: Placeholder) -> list[tuple[str, int]]:
            if placeholder.what == ALL:
                return self._addresses_of_program(placeholder.program, placeholder.port)
            is_own = own is not None and placeholder.program == own.program
            name = (
                own.spec.name if own and is_own else self._placement.nearest_instance(placeholder.program, self._node)
            )
            return [self.of(name, placeholder.port)]

        return fill_placeholders(text, own.program if own else "", self._names, find_addresses)

    def _addresses_of_program(self, program: str, port: str) -> list[tuple[str, int]]:
        return [self.of(each.spec.name, port) for each in self._placement.of(program)]

    def variables(self) -> dict[str, str]:
        """Return the environment variables that hold the addresses of all programs of the job, by name."""
        values = {}
        for program in self._names:
            name = self._placement.nearest_instance(program, self._node)
            for (instance, port), (host, number) in self._known.items():
                if instance == name and number:
                    values[address_variable_name(program, port)] = join_host_port(host, number)
                    if len(several := self._addresses_of_program(program, port)) > 1:
                        listed = ",".join(join_host_port(*each) for each in several)
                        values[address_variable_name(program, port, ADDRESSES_VARIABLE)] = listed
        return values
