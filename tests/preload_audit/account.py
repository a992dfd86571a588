"""The result of a probe, and what follows from it alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.preload_audit.state import ALIAS

Stack = tuple[str, ...]
Stacks = Mapping[str, tuple[Stack, ...]]
Place = tuple[str, str]
"""A module and a name in it."""


@dataclass(frozen=True)
class Dump:
    """What modules keep, and what belongs to none, as numbers."""

    modules: Mapping[str, Mapping[str, int]]
    shared: Mapping[str, int]
    opaque: Mapping[Place, tuple[str, ...]]
    generators: Mapping[Place, tuple[str, ...]]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Dump:
        opaque, generators = (
            {(module, name): tuple(kinds) for module, name, kinds in found[each]} for each in ("opaque", "generators")
        )
        return cls(found["modules"], found["shared"], opaque, generators)


@dataclass(frozen=True)
class Account:
    edges: Mapping[str, frozenset[str]]
    failed: Mapping[str, str]
    found: tuple[tuple[Stack, str], ...]
    read: Stacks
    changed: Stacks
    tried: Stacks
    sought: Stacks
    files: Mapping[str, str]
    logged: tuple[str, ...]
    dumps: tuple[Dump, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Account:
        """Read a probe's answer; KeyError or TypeError if it is none."""
        return cls(
            edges={name: frozenset(names) for name, names in found["edges"].items()},
            failed=found["failed"],
            found=tuple((tuple(stack), what) for stack, what in found["found"]),
            read=_stacks(found["read"]),
            changed=_stacks(found["changed"]),
            tried=_stacks(found["tried"]),
            sought=_stacks(found["sought"]),
            files=found["files"],
            logged=tuple(found["logged"]),
            dumps=tuple(map(Dump.of, found["dumps"])),
        )

    def closure(self, roots: Iterable[str], without: frozenset[str] = frozenset()) -> frozenset[str]:
        """All that these modules import, themselves among it, as far as it is there at the end."""
        found, todo = set[str](), list(roots)
        while todo:
            name = todo.pop()
            if name in found or name in without or name not in self.files:
                continue
            found.add(name)
            todo += self.edges.get(name, ())
            todo.append(name.rpartition(".")[0])
        return frozenset(found)


def _stacks(found: Mapping[str, Iterable[Iterable[str]]]) -> Stacks:
    return {name: tuple(map(tuple, stacks)) for name, stacks in found.items()}


def differences(one: Dump, other: Dump, *, only_common: bool = False) -> Iterator[Place]:
    """What is kept in one and not, or not so, in the other; ("module", "") for a whole one."""
    for module, values in one.modules.items():
        others = other.modules.get(module)
        if others is None:
            if not only_common:
                yield module, ""
            continue
        for name in sorted(values.keys() | others.keys()):
            if name.startswith(ALIAS) and not (name in values and name in others):
                continue  # bound when it was first asked for
            if values.get(name) != others.get(name):
                yield module, name.removeprefix(ALIAS)
    if not only_common:
        for module in other.modules.keys() - one.modules.keys():
            yield module, ""
