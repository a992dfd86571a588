"""``--services RUN``: gives a job the addresses of the programs of another one, which runs on this machine.

The addresses are filled in before the command line is split, so they reach all nodes of the job with that line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import join_names
from ddplaunch.base.types import parse
from ddplaunch.cli import client
from ddplaunch.cli.argv_splitter import end_of_options, option_name
from ddplaunch.cli.console_output import print_note
from ddplaunch.cli.lookup.run_index import find_running
from ddplaunch.features.programs.addresses import (
    ADDRESSES_VARIABLE,
    Placeholder,
    address_variable_name,
    fill_placeholders,
    join_host_port,
)
from ddplaunch.features.programs.request import ListServices, ServiceAddress
from ddplaunch.features.programs.spec import ProgramSpec, encode_program
from ddplaunch.features.programs.words import default_target_name

OPTION, PROGRAM_OPTION = "--services", "--program="
POLL_INTERVAL_S = 0.25


def use_services(words: Sequence[str], known: Mapping[str, bool]) -> list[str]:
    """Return the words of a ``run`` with the addresses from the run that ``--services`` names. Raises UsageError."""
    end = end_of_options(words, known)
    at = next((number for number, word in enumerate(words[:end]) if option_name(word) == OPTION), None)
    if at is None:
        return [*words]
    is_joined = "=" in words[at]
    run = words[at].partition("=")[2] if is_joined else words[at + 1]
    options = [*words[:at], *words[at + 2 - is_joined : end]]
    addresses = _await_addresses(run)
    names = [*dict.fromkeys(each.program for each in addresses)]

    def fill(text: str) -> str:
        return fill_placeholders(text, "", names, lambda each: _find_addresses(each, addresses, run))

    programs = [fill(word) for word in options if word.startswith(PROGRAM_OPTION)]
    specs = [parse(word.removeprefix(PROGRAM_OPTION), ProgramSpec) for word in programs]
    if not any(spec.is_target for spec in specs):
        specs.append(ProgramSpec(default_target_name(words[end:]), (), "main", is_target=True))
    variables = _list_variables(addresses)
    written = [encode_program(replace(spec, env={**variables, **spec.env})) for spec in specs]
    return [*written, *(word for word in options if word not in programs), *map(fill, words[end:])]


def _await_addresses(run: str) -> tuple[ServiceAddress, ...]:
    """Return the addresses of a job's programs once they are ready; no timeout, as that job has limits itself."""
    path, is_noted = find_running(run).path, False
    while not (reply := client.send_request(path, ListServices())).is_ready:
        if not is_noted:
            print_note(f"waiting for the programs of {run}")
            is_noted = True
        time.sleep(POLL_INTERVAL_S)
    if not reply.addresses:
        raise UsageError(f"{OPTION} {run}: that run has no other programs", "name a run with a service")
    return reply.addresses


def _find_addresses(placeholder: Placeholder, addresses: Sequence[ServiceAddress], run: str) -> list[tuple[str, int]]:
    """Return host and port of each process to which a placeholder refers."""
    of_port = [other for other in addresses if (other.program, other.port) == (placeholder.program, placeholder.port)]
    if placeholder.what != "host" and not any(other.number for other in of_port):
        ports = {other.port for other in addresses if other.program == placeholder.program and other.number}
        listed = join_names(f"{{{placeholder.program}.port{'.' * bool(port)}{port}}}" for port in sorted(ports))
        raise UsageError(
            f"{placeholder.text}: {placeholder.program} of {run} has no such port", f"it has {listed or 'none'}"
        )
    return [(other.host, other.number) for other in of_port]


def _list_variables(addresses: Sequence[ServiceAddress]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for address in addresses:
        if not address.number:
            continue
        of_port = [other for other in addresses if (other.program, other.port) == (address.program, address.port)]
        listed = [join_host_port(other.host, other.number) for other in of_port]
        variables[address_variable_name(address.program, address.port)] = listed[0]
        if len(listed) > 1:
            variables[address_variable_name(address.program, address.port, ADDRESSES_VARIABLE)] = ",".join(listed)
    return variables
