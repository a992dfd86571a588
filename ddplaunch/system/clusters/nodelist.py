"""Expands Slurm's node lists and task counts without ``scontrol``, which many containers lack."""

from __future__ import annotations

import re
from typing import NoReturn

from ddplaunch.base.errors import UsageError

# SLURM_JOB_NODELIST=tux[1-2]rack[3-4],gpu[07-09],login
# SLURM_STEP_TASKS_PER_NODE=2(x3),1

MAX_BYTES = 65536  # maximum number of hosts (MAX_RANGE of Slurm's hostlist.c); more is a typing error
_NAME = r"[A-Za-z0-9_.-]+"
_RANGE = r"([0-9]{1,18})(?:-([0-9]{1,18}))?"
_COUNT = r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?"


def expand_hosts(text: str, source: str) -> tuple[str, ...]:
    """Return the hosts of a list as ``scontrol show hostnames`` would, in its order.

    A range keeps the leading zeros of its first number. Of two brackets in a name the second varies fastest; of three
    or more the last does, while scontrol mixes them. Text after a bracket is allowed, unlike in scontrol.

    ``source`` is the name of the list in errors: a variable or an option. Raises UsageError if it does not parse.
    """
    hosts: list[str] = []
    position = -1
    while position < len(text):
        names, position = _expand_host(text, position + 1, source)
        hosts += names
        _check_count(len(hosts), text, source)
        if position < len(text) and text[position] != ",":
            _raise_parse_error(text, position, source, "a comma or the end")
    return tuple(hosts)


def _expand_host(text: str, position: int, source: str) -> tuple[list[str], int]:
    """Expand one name with its brackets; return its hosts and the position after it."""
    names, start = [""], position
    while position < len(text):
        if name := _match(_NAME, text, position):
            names = [each + name[0] for each in names]
            position = name.end()
        elif text[position] == "[":
            numbers, position = _expand_bracket(text, position + 1, source, len(names))
            names = [each + number for each in names for number in numbers]
        else:
            break
    if position == start:
        _raise_parse_error(text, position, source, "a host's name")
    return names, position


def _expand_bracket(text: str, position: int, source: str, times: int) -> tuple[list[str], int]:
    """Expand "1-2,07]"; return the numbers as written and the position after the bracket."""
    numbers: list[str] = []
    while True:
        match = _match(_RANGE, text, position)
        if not match:
            _raise_parse_error(text, position, source, "a number")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            _raise_parse_error(text, position, source, f"a range that rises, not {match[0]}")
        _check_count((len(numbers) + int(last) - int(first) + 1) * times, text, source)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        position = match.end()
        if text[position : position + 1] == "]":
            return numbers, position + 1
        if text[position : position + 1] != ",":
            _raise_parse_error(text, position, source, "a comma or ]")
        position += 1


def expand_counts(text: str, source: str) -> tuple[int, ...]:
    """Return the counts of a compressed list: "2(x3),1" is 2, 2, 2, 1. Raises UsageError if it does not parse."""
    counts: list[int] = []
    position = -1
    while position < len(text):
        match = _match(_COUNT, text, position + 1)
        if not match:
            _raise_parse_error(text, position + 1, source, "a count like 2 or 2(x3)")
        times = int(match[2] or 1)
        _check_count(len(counts) + times, text, source)
        counts += [int(match[1])] * times
        position = match.end()
        if position < len(text) and text[position] != ",":
            _raise_parse_error(text, position, source, "a comma or the end")
    return tuple(counts)


def _match(pattern: str, text: str, position: int) -> re.Match[str] | None:
    return re.compile(pattern).match(text, position)  # only on use: compiling takes as long as importing a file


def _check_count(count: int, text: str, source: str) -> None:
    if count > MAX_BYTES:
        raise UsageError(f"{source}: {text} names more than {MAX_BYTES} nodes", "is there a digit too many?")


def _raise_parse_error(text: str, position: int, source: str, expected: str) -> NoReturn:
    rest = text[position : position + 12]
    where = f"at {rest!r}, character {position + 1}" if rest else "at its end"
    what = f"{source}: {text!r} cannot be read {where}: expected {expected}"
    raise UsageError(what, "hosts like n[01-04],gpu7, counts like 4(x3),2; --cluster none reads no variables")
