"""What one interpreter of an audit has reported, and what follows from it alone."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.preload_audit.state import ALIAS

Stack = tuple[str, ...]
Stacks = Mapping[str, Collection[Stack]]
Place = tuple[str, str]
"""A module and a name in it."""


@dataclass(frozen=True)
class Dump:
    """What modules keep, and what belongs to none, as numbers."""

    modules: Mapping[str, Mapping[str, int]]
    shared: Mapping[str, int]
    opaque: Mapping[Place, Collection[str]]
    generators: Mapping[Place, Collection[str]]


@dataclass(frozen=True)
class Account:
    edges: Mapping[str, Collection[str]]
    failed: Mapping[str, str]
    found: Collection[tuple[Stack, str]]
    read: Stacks
    changed: Stacks
    tried: Stacks
    sought: Stacks
    files: Mapping[str, str]
    logged: Sequence[str]
    dumps: Sequence[Dump]

    @classmethod
    def read_file(cls, path: Path) -> Account:
        """Read a probe's answer; OSError, ValueError or TypeError if there is none."""
        found = marshal.loads(path.read_bytes())
        return cls(**{**found, "dumps": [Dump(**each) for each in found["dumps"]]})

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
