"""The report of one interpreter of an audit (probe.py writes it), and comparisons of its snapshots."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.preload_audit.state import ALIAS

Stack = tuple[str, ...]
"""The modules that were being executed, outermost first."""

Stacks = Mapping[str, Collection[Stack]]

Attribute = tuple[str, str]
"""A module and a name in it."""


@dataclass(frozen=True)
class Snapshot:
    """Hashes of the values that modules have, and of state that belongs to no module."""

    modules: Mapping[str, Mapping[str, int]]
    shared: Mapping[str, int]
    opaque: Mapping[Attribute, Collection[str]]
    generators: Mapping[Attribute, Collection[str]]


@dataclass(frozen=True)
class ProbeReport:
    """What one interpreter recorded while it imported modules.

    ``recorder.Recorder`` and ``import_stack.ImportStack`` describe the fields of the same names.
    """

    edges: Mapping[str, Collection[str]]
    import_errors: Mapping[str, str]
    actions: Collection[tuple[Stack, str]]
    state_changes: Stacks
    absent_imports: Stacks
    files: Mapping[str, str]
    snapshots: Sequence[Snapshot]

    @classmethod
    def read_file(cls, path: Path) -> ProbeReport:
        """Read a probe's report; OSError, EOFError, ValueError or TypeError if there is none."""
        fields = marshal.loads(path.read_bytes())
        return cls(**{**fields, "snapshots": [Snapshot(**each) for each in fields["snapshots"]]})

    def closure(self, roots: Iterable[str], without: frozenset[str] = frozenset()) -> frozenset[str]:
        """All modules that these import, directly or not, and that were loaded at the end; with the roots."""
        found, todo = set[str](), list(roots)
        while todo:
            name = todo.pop()
            if name in found or name in without or name not in self.files:
                continue
            found.add(name)
            todo += self.edges.get(name, ())
            todo.append(name.rpartition(".")[0])
        return frozenset(found)


def diff_snapshots(one: Snapshot, other: Snapshot, *, only_common: bool = False) -> Iterator[Attribute]:
    """Yield the attributes that differ; ("module", "") for a module that only one of them has."""
    for module, values in one.modules.items():
        others = other.modules.get(module)
        if others is None:
            if not only_common:
                yield module, ""
            continue
        for name in sorted(values.keys() | others.keys()):
            if name.startswith(ALIAS) and not (name in values and name in others):
                continue  # a module may bind an alias on its first use
            if values.get(name) != others.get(name):
                yield module, name.removeprefix(ALIAS)
    if not only_common:
        for module in other.modules.keys() - one.modules.keys():
            yield module, ""
