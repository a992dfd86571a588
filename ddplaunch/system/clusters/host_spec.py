"""Parses host lists: ``--hosts``, ``--hostfile``, ``--include`` and ``--exclude``."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.safe_files import MAX_HOSTFILE_BYTES, read_user_file
from ddplaunch.system.clusters.nodelist import expand_hosts

# --hosts a:4,n[01-04]:8,b,me@c,[fd00::1]:4
#
# worker-1 slots=4                  # DeepSpeed's, Open MPI's and Horovod's
# worker-3 slots=4 max_slots=8      # Open MPI's
# worker-2:4                        # MPICH's
# n[01-16] slots=8
# login                             # all slots of the host; PBS and LSF list each host once per slot
# worker-4 4 all.q@worker-4 UNDEFINED   # SGE's
#
# --include worker-1@worker-2:0,2

MAX_SLOTS = 4096  # more ranks on one host are taken for a typing error
_ENTRY = re.compile(
    r"(?:(?P<user>[^\s:,@\[\]]*)@)?"
    r"(?:\[(?P<address>[^\s\[\]]*:[^\s\[\]]*)\]|(?P<name>(?:[^\s:,@\[\]]|\[[^\s:\[\]]*\])+))"
    r"(?::(?P<slots>[^\s:,]*))?"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]+")
_CHOICE = re.compile(r"(?:\[([^\]]*)\]|([^\[:]*))(:?)(.*)")
_BRACKETS = re.compile(r"(\[[^\[\]]*\])")
_MAX_SLOTS = ("max_slots", "max-slots", "slots_max", "slots-max")
_EXAMPLE = "write one host a line: n1, n1:4, n1 slots=4 or n[01-04] slots=8; # begins a comment"


class Host(Struct, frozen=True):
    """A machine of the job."""

    name: str  # a name, an address (IPv6 without brackets), or an alias in the user's ssh configuration
    slots: int | None = None  # number of ranks; None: the host's own default
    gpus: tuple[int, ...] | None = None  # the slots that `--include` or `--exclude` leaves; None for all
    user: str | None = None  # login name; None: by the ssh configuration

    @property
    def destination(self) -> str:
        """The host as an argument of ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_host_options(
    hosts: str | None, hostfile: str | None, include: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Read --hosts or --hostfile, and apply --include or --exclude. Raises UsageError if a value is invalid."""
    if hosts is not None and hostfile is not None:
        both = f"--hosts {sanitize_line(hosts, 100)} and --hostfile {sanitize_line(hostfile, 100)}"
        raise _error(f"{both} contradict each other", "leave one of them out")
    return filter_hosts(read_hostfile(hostfile) if hostfile is not None else parse_hosts(hosts or ""), include, exclude)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read the value of ``--hosts``. Raises UsageError with the offending part."""
    hint = "--hosts n1:4,n2:4, or --hosts n[1-4]:8"
    if not text.strip():
        raise _error("--hosts is empty", hint)
    source = f"--hosts {sanitize_line(text, 100)}"
    return _check_unique(
        (source, host) for part in _split_outside_brackets(text) for host in _parse_entry(part.strip(), source, hint)
    )


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read a file of hosts. Raises UsageError if it cannot be read, or a line does not parse."""
    try:
        text = read_user_file(path, MAX_HOSTFILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise _error(f"--hostfile {path}: {error.strerror}", "a relative path starts at the current folder") from None
    except UnicodeDecodeError:
        raise _error(f"--hostfile {path} is not a text file", _EXAMPLE) from None
    hosts = _check_unique(_sum_slots(list(_lines(text, path))))
    if not hosts:
        raise _error(f"--hostfile {path} has no hosts", _EXAMPLE)
    return hosts


class _HostfileEntry(Struct, frozen=True):
    """A host on a line of a hostfile. ``adds_slots``: its slots are added to those of other lines of the host."""

    source: str
    host: Host
    adds_slots: bool


def _lines(text: str, path: str) -> Iterator[_HostfileEntry]:
    for number, line in enumerate(text.split("\n"), 1):
        stated, source = line.partition("#")[0], f"{path}:{number}"
        words = "=".join(part.strip() for part in stated.split("=")).split()
        if not words:
            continue
        name, *rest = words
        if len(rest) == 3 and rest[0].isdigit() and "=" not in f"{rest[1]}{rest[2]}":  # of SGE
            slots: int | None = _slots(rest[0], name, source, _EXAMPLE)
            adds = True
        else:
            slots, adds = _parse_slots_words(rest, name, source), not rest and ":" not in name.rpartition("]")[2]
        for host in _parse_entry(name, source, _EXAMPLE):
            if slots is not None and host.slots is not None:
                raise _error(f"{source}: '{sanitize_line(line, 100)}' has two numbers of slots", _EXAMPLE)
            yield _HostfileEntry(source, replace(host, slots=host.slots if slots is None else slots), adds)


def _parse_slots_words(words: list[str], host: str, source: str) -> int | None:
    """Return the number of slots in ``slots=4 max_slots=8``; max_slots is an upper bound, or the number if alone."""
    values: dict[str, int] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = "max_slots" if name in _MAX_SLOTS else name
        if name not in ("slots", "max_slots") or not equals or name in values:
            raise _error(f"{source}: cannot read '{sanitize_line(word, 60)}'", _EXAMPLE)
        values[name] = _slots(value, host, source, _EXAMPLE)
    slots, max_slots = values.get("slots"), values.get("max_slots")
    if slots is not None and max_slots is not None and slots > max_slots:
        raise _error(f"{source}: slots={slots} is more than max_slots={max_slots}", "use max_slots or less")
    return max_slots if slots is None else slots


def _sum_slots(lines: list[_HostfileEntry]) -> Iterator[tuple[str, Host]]:
    """Merge the lines that add slots to the same host; a line with only a name adds 1 slot if any name is repeated."""
    times = Counter((line.host.destination, line.host.slots is None) for line in lines if line.adds_slots)
    counts = any(number > 1 for (_, alone), number in times.items() if alone)
    slots = Counter[str]()
    for line in lines:
        if line.adds_slots:
            slots[line.host.destination] += line.host.slots or 1
    given = set()
    for line in lines:
        host = line.host
        if not line.adds_slots or (host.slots is None and not counts):
            yield line.source, host
        elif host.destination not in given:
            given.add(host.destination)
            yield line.source, replace(host, slots=_slots(str(slots[host.destination]), host.name, line.source, ""))


def _split_outside_brackets(text: str) -> list[str]:
    """Split a text at its commas, except those inside brackets."""
    parts = [""]
    for piece in _BRACKETS.split(text):
        first, *rest = [piece] if _BRACKETS.fullmatch(piece) else piece.split(",")
        parts[-1] += first
        parts += rest
    return parts


def _parse_entry(text: str, source: str, hint: str) -> Iterator[Host]:
    """Read ``name``, ``name:N`` or either with ranges in brackets."""
    match = _ENTRY.fullmatch(text)
    if not match:
        if text.count(":") > 1:
            hint = "write an IPv6 address in brackets: [fd00::1]:4"
        what = f"'{sanitize_line(text, 60)}' is not a host" if text else "a host has no name"
        raise _error(f"{source}: {what}", hint)
    slots = None if match["slots"] is None else _slots(match["slots"], text.rpartition(":")[0], source, hint)
    user = match["user"]
    if user is not None and not _NAME.fullmatch(user):
        raise _error(f"{source}: '{sanitize_line(user, 60)}' is not a user name", f"{hint}, or me@n1")
    if match["address"] is not None:
        yield Host(_address(match["address"], source), slots, user=user)
        return
    try:
        names = expand_hosts(match["name"], source)
    except UsageError as error:
        raise _error(error.message, hint) from None
    for name in names:
        if not _NAME.fullmatch(name):  # ssh would take -oProxyCommand=… for an option
            raise _error(f"{source}: '{sanitize_line(name, 60)}' is not a host name", hint)
        if len(name) > 253 or not all(0 < len(label) < 64 for label in name.removesuffix(".").split(".")):
            what = "a name has at most 253 characters, and 1 to 63 between dots"
            raise _error(f"{source}: '{sanitize_line(name, 60)}' is not a host name: {what}", hint)
        yield Host(name, slots, user=user)


def _address(text: str, source: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        address = None
    if address is None or (address.scope_id and not _SCOPE.fullmatch(address.scope_id)):  # shells may read it (%h)
        what = f"{source}: [{sanitize_line(text, 60)}] is not an IPv6 address"
        raise _error(what, "[fd00::1]:4; a range is n[1-4]:4")
    return str(address)


def _slots(text: str, host: str, source: str, hint: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise _error(f"{source}: '{sanitize_line(text, 40)}' is not a number of slots", hint)
    if int(text) == 0:
        raise _error(f"{source}: {host} has 0 slots", "leave it out, or give it 1 or more")
    if int(text) > MAX_SLOTS:
        raise _error(f"{source}: {text} slots are more than {MAX_SLOTS}", f"use {MAX_SLOTS} or less")
    return int(text)


def _check_unique(hosts: Iterable[tuple[str, Host]]) -> tuple[Host, ...]:
    first: dict[str, str] = {}
    selected = []
    for source, host in hosts:
        if host.name in first:
            before = f", and before at {first[host.name]}" if first[host.name] != source else ""
            raise _error(f"{source}: {host.name} is named twice{before}", "name each host once, with all its slots")
        first[host.name] = source
        selected.append(host)
    return tuple(selected)


# --------------------------------------------------------------------------------------------------- include, exclude


def filter_hosts(hosts: tuple[Host, ...], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Keep the hosts that ``--include`` names, or those that ``--exclude`` does not name, in their order.

    The grammar is DeepSpeed's (parse_resource_filter of its launcher/runner.py): ``NODE[:SLOT,…]@NODE…``, where a node
    without slots means all its slots. Raises UsageError if both are given, one does not parse or names an unknown host
    or slot, or no host is left.
    """
    if include is not None and exclude is not None:
        raise _error(f"--include {include} does not work with --exclude {exclude}", "leave one of them out")
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    if text is None:
        return hosts
    named = _filter(text, option, {host.name: host for host in hosts})
    selected = []
    for host in hosts:
        if host.name not in named:
            if option == "--exclude":
                selected.append(host)
            continue
        slots = named[host.name]
        if option == "--exclude":
            slots = () if slots is None else tuple(slot for slot in range(host.slots or 0) if slot not in slots)
        if slots is None:
            selected.append(host)
        elif slots:
            selected.append(replace(host, slots=len(slots), gpus=slots))
    if not selected:
        raise _error(f"{option} {text} leaves no host", "leave at least one")
    return tuple(selected)


def _filter(text: str, option: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...] | None]:
    """Parse the value of ``--include`` or ``--exclude``: the slots of each named host, None for all its slots."""
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        found = _CHOICE.fullmatch(part.strip())
        name, colon, listed = (found[1] or found[2], found[3], found[4]) if found else (part, "", "")
        host = hosts.get(name)
        if not name:
            _raise_invalid_selection(option, text, "a node has no name")
        if host is None:
            _raise_invalid_selection(option, text, f"{sanitize_line(name, 60)} is not among the hosts")
        if name in named:
            _raise_invalid_selection(option, text, f"{name} is named twice")
        named[name] = None
        if not colon:
            continue
        slots: set[int] = set()
        for word in listed.split(","):
            if not re.fullmatch(r"[0-9]{1,9}", word):
                _raise_invalid_selection(option, text, f"'{sanitize_line(word, 40)}' is not a slot of {name}")
            if int(word) >= (host.slots or MAX_SLOTS):
                _raise_invalid_selection(
                    option, text, f"{name} has no slot {word}, only 0 to {(host.slots or MAX_SLOTS) - 1}"
                )
            if int(word) in slots:
                _raise_invalid_selection(option, text, f"slot {word} of {name} is named twice")
            slots.add(int(word))
        if host.slots is None and option == "--exclude":
            raise _error(f"{option} {text}: the number of slots of {name} is not known", f"--hosts {name}:8 gives it")
        named[name] = tuple(sorted(slots))
    return named


def _raise_invalid_selection(option: str, text: str, what: str) -> NoReturn:
    raise _error(
        f"{option} {sanitize_line(text, 100)}: {what}", f"{option} n1@n2:0,2 means n1, and slots 0 and 2 of n2"
    )


def _error(what: str, hint: str | None) -> UsageError:
    return UsageError(sanitize_line(what, 400), hint)
