"""Which modules may not be imported for all ranks, given what was seen of their imports; and what is left to import.

Pure but for ``natives``, which looks into shared objects. A module is guilty of what happened while it was on the
stack; guilt goes on to whoever imports a guilty module, and to the modules inside a guilty package. What torch imports
is never guilty: it is imported for all ranks in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ddplaunch.dataclass import dataclass, field
from ddplaunch.preload import excused
from ddplaunch.preload.state import ALIAS

Stack = tuple[str, ...]

BY_CONTRACT = ("torch", "torch._dynamo")
"""Preloaded without a trial, where a program needs them (docs/performance.md)."""


@dataclass(frozen=True)
class Loaded:
    """A module that was executed, the one that was being executed then, and the statement that led there."""

    name: str
    above: str
    statement: str


@dataclass(frozen=True)
class Account:
    """What a probe saw: the fields of its answer."""

    loaded: tuple[Loaded, ...]
    edges: Mapping[str, frozenset[str]]
    asked: frozenset[str]
    failed: Mapping[str, str]
    found: tuple[tuple[Stack, str], ...]
    read: Mapping[str, tuple[Stack, ...]]
    changed: Mapping[str, tuple[Stack, ...]]
    libraries: Mapping[str, Stack]
    files: Mapping[str, str]
    kept: Mapping[str, Mapping[str, int]]  # by module and name
    shared: Mapping[str, int]

    @classmethod
    def of(cls, found: dict[str, object]) -> Account:
        """Read a probe's answer; KeyError or TypeError if it is none."""
        answer: dict[str, Any] = found
        return cls(
            loaded=tuple(Loaded(*each) for each in answer["loaded"]),
            edges={name: frozenset(names) for name, names in answer["edges"].items()},
            asked=frozenset(answer["asked"]),
            failed=answer["failed"],
            found=tuple((tuple(stack), what) for stack, what in answer["found"]),
            read={name: tuple(map(tuple, stacks)) for name, stacks in answer["read"].items()},
            changed={name: tuple(map(tuple, stacks)) for name, stacks in answer["changed"].items()},
            libraries={path: tuple(stack) for path, stack in answer["libraries"].items()},
            files=answer["files"],
            kept=answer["kept"].get("modules", {}),
            shared=answer["kept"].get("shared", {}),
        )


@dataclass(frozen=True)
class Guilt:
    culprit: str  # the module that did it
    reason: str  # what, in words


@dataclass
class Culprits:
    """The guilty modules, and why; grows from round to round.

    ``is_python`` says of a module and its file whether it is of the standard library.
    """

    plain: Account
    is_python: Callable[[str], bool]
    guilty: dict[str, Guilt] = field(default_factory=dict)
    edges: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.learn(self.plain)

    def learn(self, account: Account) -> None:
        """Take over who imports whom."""
        for name, names in account.edges.items():
            self.edges.setdefault(name, set()).update(names)

    def exempt(self, roots: Iterable[str] = BY_CONTRACT) -> frozenset[str]:
        """What is imported in any case, because these modules import it."""
        found, todo = set[str](), [name for name in roots if name in self.edges]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self.edges.get(name, ())
        return frozenset(found)

    def accuse(self, stack: Stack, reason: str, exempt: frozenset[str]) -> bool:
        """Hold all modules of a stack guilty, unless what is exempt did it; return whether that is news."""
        if not exempt.isdisjoint(stack):
            return False
        own = [name for name in stack if not self.is_python(name)]
        news = [name for name in own if name not in self.guilty]
        for name in news:
            self.guilty[name] = Guilt(own[-1], reason)
        return bool(news)

    def accuse_module(self, name: str, reason: str, exempt: frozenset[str]) -> bool:
        return self.accuse((name,), reason, exempt)

    def spread(self) -> None:
        """Pass guilt on to importers, and into packages."""
        exempt = self.exempt()
        importers: dict[str, set[str]] = {}
        for name, names in self.edges.items():
            for each in names:
                importers.setdefault(each, set()).add(name)
                above = each.rpartition(".")[0]
                if above:
                    importers.setdefault(above, set()).add(each)
        for name in list(importers):
            above = name.rpartition(".")[0]
            if above:
                importers.setdefault(above, set()).add(name)
        todo = list(self.guilty)
        while todo:
            name = todo.pop()
            for each in importers.get(name, ()):
                if each and each not in self.guilty and each not in exempt and not self.is_python(each):
                    self.guilty[each] = self.guilty[name]
                    todo.append(each)

    def innocent(self) -> tuple[str, ...]:
        """What to import so that all that is not guilty is there, in the program's order, torch among it."""
        below: dict[str, list[str]] = {}
        for each in self.plain.loaded:
            if each.above or each.statement:
                below.setdefault(each.above, []).append(each.name)
        names: list[str] = []
        there: set[str] = set()
        visited: set[str] = set()

        def arrive(name: str) -> None:
            there.add(name)
            for each in below.get(name, ()):
                if each not in there:
                    arrive(each)

        def visit(name: str) -> None:
            if name in there or name in visited:
                return
            visited.add(name)
            if name in self.guilty or self.is_python(name) or not self._complete(name):
                for each in below.get(name, ()):
                    visit(each)
            else:
                names.append(name)
                arrive(name)

        for name in below.get("", ()):
            visit(name)
        if "torch" not in names:
            names.insert(self._place_of_torch(names, below), "torch")
        return tuple(dict.fromkeys(names))

    def _complete(self, name: str) -> bool:
        """Whether an import that was begun left its module."""
        return name in self.plain.files

    def _place_of_torch(self, names: list[str], below: Mapping[str, list[str]]) -> int:
        """Where torch is imported within another module: right after that one, which changes nothing."""
        for number, name in enumerate(names):
            todo = [name]
            while todo:
                if (each := todo.pop()) == "torch":
                    return number + 1
                todo += below.get(each, ())
        return 0

    def excluded(self) -> Iterator[tuple[str, str]]:
        """For each statement of the program that is not wholly preloaded: its package, and why."""
        said = set[str]()
        for each in self.plain.loaded:
            module = each.statement or each.name
            top = module if module.startswith("torch.") else module.partition(".")[0]
            if each.above or each.name not in self.guilty or top in said:
                continue
            guilt = self.guilty[each.name]
            culprit = guilt.culprit.partition(".")[0]
            said.add(top)
            yield top, guilt.reason if culprit == top else f"imports {culprit}, which {guilt.reason}"


def differences(plain: Account, fork: Account) -> Iterator[tuple[str, str]]:
    """Modules that keep something else in a fork than in plain Python, and the name of that."""
    for module, values in plain.kept.items():
        others = fork.kept.get(module)
        if others is None:
            yield module, ""
            continue
        for name in values.keys() | others.keys():
            if name.startswith(ALIAS) and not (name in values and name in others):
                continue  # bound when it was first asked for
            if values.get(name) != others.get(name):
                yield module, name.removeprefix(ALIAS)
    for module in fork.kept.keys() - plain.kept.keys():
        yield module, ""


def natives(
    account: Account, ranks: Iterable[str], own: Iterable[str], *, any_name: bool
) -> Iterator[tuple[Stack, str]]:
    """Shared objects that may read one of these variables as they are loaded: stacks and what they do.

    What native code reads cannot be traced, so the names are looked for in the files that call getenv: those of
    ``ranks``, which are words too, as C has them, and the program's ``own`` as Rust does also, without an end. With
    ``any_name`` each file that calls getenv is one.
    """
    wanted = [(name, b"\0" + name.encode() + b"\0") for name in ranks]
    wanted += [(name, name.encode()) for name in own if name not in excused.READ_LATE]
    for path, stack in account.libraries.items():
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            continue
        if b"getenv\0" not in content:
            continue
        if any_name:
            yield stack, "may read a variable that the program sets"
        for name, word in wanted:
            if word in content:
                yield stack, f"may read {name} in native code"
