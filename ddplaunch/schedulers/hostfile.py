"""The hosts of a job as people write them: ``--hosts``, ``--hostfile``, ``--include`` and ``--exclude``."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from ddplaunch.clusters.nodelist import expand_hosts
from ddplaunch.errors import UsageError

# --hosts a:4,n[01-04]:8,b,me@c,[fd00::1]:4
#
# worker-1 slots=4     # DeepSpeed's, Open MPI's and Horovod's
# worker-2:4
# n[01-16] slots=8
# login                # as many as it has
#
# --include worker-1@worker-2:0,2

MOST_SLOTS = 4096
"""More ranks than that on one host is a slip."""

_ENTRY = re.compile(
    r"(?:(?P<user>[^\s:,@\[\]]*)@)?"
    r"(?:\[(?P<address>[^\s\[\]]*:[^\s\[\]]*)\]|(?P<name>(?:[^\s:,@\[\]]|\[[^\s:\[\]]*\])+))"
    r"(?::(?P<slots>[^\s:,]*))?"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CHOICE = re.compile(r"(?:\[([^\]]*)\]|([^\[:]*))(:?)(.*)")
_COMMA = re.compile(r",(?![^\[\]]*\])")
_EXAMPLE = "a host a line: n1, n1:4, n1 slots=4 or n[01-04] slots=8; # begins a comment"


@dataclass(frozen=True)
class Host:
    """A machine of the job."""

    name: str
    """A name or an address, or what the user's ssh configuration makes one of; of IPv6 without brackets."""

    slots: int | None = None
    """How many ranks it gets; None where the host itself knows better."""

    gpus: tuple[int, ...] | None = None
    """Which of its slots, where ``--include`` or ``--exclude`` has chosen some."""

    user: str | None = None
    """Who logs in, where it is not for the ssh configuration to say."""

    @property
    def destination(self) -> str:
        """What ssh is told."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_hosts(text: str) -> tuple[Host, ...]:
    """Read the value of ``--hosts``.

    Raises:
        UsageError: it makes no sense; says where.
    """
    hint = "--hosts n1:4,n2:4, or --hosts n[1-4]:8"
    if not text.strip():
        raise UsageError("--hosts names no host", hint)
    parts = ((f"--hosts {text}", part.strip()) for part in _COMMA.split(text))
    return _without_doubles((source, host) for source, part in parts for host in _entry(part, source, hint))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read a file of hosts.

    Raises:
        UsageError: it cannot be read, or a line of it makes no sense; names file and line.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}", "is this the right folder?") from None
    except UnicodeDecodeError:
        raise UsageError(f"--hostfile {path} is no text", _EXAMPLE) from None
    hosts = _without_doubles(_lines(text, path))
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host", _EXAMPLE)
    return hosts


def _lines(text: str, path: str) -> Iterator[tuple[str, Host]]:
    for number, line in enumerate(text.split("\n"), 1):
        words, source = line.partition("#")[0].split(), f"{path}:{number}"
        if not words:
            continue
        slots = None
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name != "slots" or not equals or slots is not None:
                raise UsageError(f"{source}: {word!r} makes no sense", _EXAMPLE)
            slots = _slots(value, words[0], source, _EXAMPLE)
        for host in _entry(words[0], source, _EXAMPLE):
            if slots is not None and host.slots is not None:
                raise UsageError(f"{source}: {line.strip()!r} says twice how many slots", _EXAMPLE)
            yield source, replace(host, slots=host.slots if slots is None else slots)


def _entry(text: str, source: str, hint: str) -> Iterator[Host]:
    """Read ``name``, ``name:N`` or either with ranges in brackets."""
    found = _ENTRY.fullmatch(text)
    if not found:
        if text.count(":") > 1:
            hint = "an address of IPv6 stands in brackets: [fd00::1]:4"
        what = f"{text!r} is no host" if text else "there is a host without a name"
        raise UsageError(f"{source}: {what}", hint)
    slots = None if found["slots"] is None else _slots(found["slots"], text.rpartition(":")[0], source, hint)
    user = found["user"]
    if user is not None and not _NAME.fullmatch(user):
        raise UsageError(f"{source}: {user!r} is no user's name", f"{hint}, or me@n1")
    if found["address"] is not None:
        yield Host(_address(found["address"], source), slots, user=user)
        return
    for name in expand_hosts(found["name"], source):
        if not _NAME.fullmatch(name):  # ssh would take -oProxyCommand=… for an option
            raise UsageError(f"{source}: {name!r} is no host's name", hint)
        yield Host(name, slots, user=user)


def _address(text: str, source: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise UsageError(f"{source}: [{text}] is no address of IPv6", "[fd00::1]:4; a range is n[1-4]:4") from None


def _slots(text: str, host: str, source: str, hint: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(f"{source}: {text!r} is no number of slots", hint)
    if int(text) == 0:
        raise UsageError(f"{source}: {host} has 0 slots and would run nothing", "leave it out")
    if int(text) > MOST_SLOTS:
        raise UsageError(f"{source}: {text} slots are more than {MOST_SLOTS}", "is there a digit too many?")
    return int(text)


def _without_doubles(hosts: Iterable[tuple[str, Host]]) -> tuple[Host, ...]:
    first: dict[str, str] = {}
    kept = []
    for source, host in hosts:
        if host.name in first:
            before = f", and before at {first[host.name]}" if first[host.name] != source else ""
            raise UsageError(
                f"{source}: {host.name} is named twice{before}", "name each host once, with all of its slots"
            )
        first[host.name] = source
        kept.append(host)
    return tuple(kept)


# --------------------------------------------------------------------------------------------------- include, exclude


def choose(hosts: tuple[Host, ...], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Keep those that ``--include`` names, or those that ``--exclude`` does not; in the order of ``hosts``.

    The grammar is DeepSpeed's (parse_resource_filter of its launcher/runner.py): ``NODE[:SLOT,…]@NODE…``, where a node
    without slots is all of it.

    Raises:
        UsageError: both are given, one does not parse, or it names what is not among ``hosts``; or nothing is left.
    """
    if include is not None and exclude is not None:
        raise UsageError(f"--include {include} and --exclude {exclude} contradict each other", "leave one of them out")
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    if text is None:
        return hosts
    named = _filter(text, option, {host.name: host for host in hosts})
    kept = []
    for host in hosts:
        if host.name not in named:
            if option == "--exclude":
                kept.append(host)
            continue
        slots = named[host.name]
        if option == "--exclude":
            slots = () if slots is None else tuple(slot for slot in range(host.slots or 0) if slot not in slots)
        if slots is None:
            kept.append(host)
        elif slots:
            kept.append(replace(host, slots=len(slots), gpus=slots))
    if not kept:
        raise UsageError(f"{option} {text} leaves no host", "leave one in")
    return tuple(kept)


def _filter(text: str, option: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...] | None]:
    """Read what a filter names: for each host its slots, or None for all of them."""
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        found = _CHOICE.fullmatch(part.strip())
        name, colon, listed = (found[1] or found[2], found[3], found[4]) if found else (part, "", "")
        host = hosts.get(name)
        if not name:
            _refuse(option, text, "there is a node without a name")
        if host is None:
            _refuse(option, text, f"{name} is not among the hosts")
        if name in named:
            _refuse(option, text, f"{name} is named twice")
        named[name] = None
        if not colon:
            continue
        slots: set[int] = set()
        for word in listed.split(","):
            if not re.fullmatch(r"[0-9]{1,9}", word):
                _refuse(option, text, f"{word!r} is no slot of {name}")
            if int(word) >= (host.slots or MOST_SLOTS):
                _refuse(option, text, f"{name} has no slot {word}, but 0 to {(host.slots or MOST_SLOTS) - 1}")
            if int(word) in slots:
                _refuse(option, text, f"slot {word} of {name} is named twice")
            slots.add(int(word))
        if host.slots is None and option == "--exclude":
            raise UsageError(f"{option} {text}: how many slots has {name}?", f"name it {name}:8 among the hosts")
        named[name] = tuple(sorted(slots))
    return named


def _refuse(option: str, text: str, what: str) -> NoReturn:
    raise UsageError(f"{option} {text}: {what}", f"{option} n1@n2:0,2 is n1, and slots 0 and 2 of n2")
