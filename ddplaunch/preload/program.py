"""What a program imports of others, and which variables it sets, read from its source and that of its local modules.

Nothing of it runs. The order is that in which running it would meet the statements (``scan`` reads one file).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Collection, Iterator

from ddplaunch.dataclass import dataclass, replace
from ddplaunch.preload.facts import Assignment, Doubt, Import, Reach, Seeding
from ddplaunch.preload.question import Question, Setting, Statement
from ddplaunch.preload.scans import Scans
from ddplaunch.target import source
from ddplaunch.target.target import Target

TORCH = "torch"
DYNAMO = "torch._dynamo"

_MAX_FILES = 200  # as ``source.local_sources``


@dataclass(frozen=True)
class Variable:
    """One that the program sets.

    Attributes:
        where: "train.py:3".
        value: None where the source does not show it, or where it is set only sometimes.
        default: only where it is not set already.
        after: certainly after torch was imported, and so too late for what torch read then.
        early: certainly before anything was imported that is not Python's own.
    """

    name: str | None  # None where the source does not show it
    where: str
    value: str | None
    default: bool
    after: bool
    early: bool


@dataclass(frozen=True)
class Program:
    """All of it.

    Attributes:
        statements: what it imports of others as its modules are loaded.
        variables: what it sets, in order.
        imports_torch: torch is certainly imported before anything else is done.
        seeds_first: a random generator is seeded while its modules are loaded, and more is imported afterwards.
        dynamo: it seems to use what imports ``torch._dynamo`` (and sympy with it, a second in every rank).
        doubt: why nothing but torch may be imported for it: "train.py:3 changes sys.path".
    """

    statements: tuple[Statement, ...] = ()
    variables: tuple[Variable, ...] = ()
    imports_torch: bool = False
    seeds_first: bool = False
    dynamo: bool = False
    doubt: str | None = None

    def question(self, environ: Collection[str]) -> Question:
        """What is to be tried for it, where these variables are set already.

        A setting has a value only if all that is tried would be imported under it.
        """
        set_here = [each for each in self.variables if not (each.default and each.name in environ)]
        names = [each.name for each in set_here]
        settings = (
            Setting(each.name, each.value if each.early and names.count(each.name) == 1 else None)
            for each in set_here
            if each.name is not None
        )
        statements = self.statements
        if all(each.module.partition(".")[0] != TORCH for each in statements):
            statements = (Statement(TORCH), *statements)
        if self.dynamo:
            statements = (*statements, Statement(DYNAMO))
        return Question(
            statements=tuple(dict.fromkeys(statements)),
            settings=tuple(dict.fromkeys(settings)),
            sets_unseen=None in names,
            seeds_first=self.seeds_first,
        )


def read(target: Target) -> Program:
    """Read the source of ``target``; a program whose source is not there says nothing."""
    if target.source is None or target.first is None:
        return Program()
    return _Reading(target.first, Scans(os.path.abspath(target.source))).program(target)


class _Reading:
    def __init__(self, first: str, scans: Scans) -> None:
        self._first, self._scans = first, scans
        self._seen: set[str] = set()
        self._known: dict[str, tuple[str, ...]] = {}  # files by the name of a module
        self._statements: list[Statement] = []
        self._variables: list[Variable] = []
        self._torch = self._others = self._dynamo = self._seeded = self._seeds_first = False
        self._doubt: str | None = None
        self._later: deque[tuple[Import, str, bool]] = deque()  # what is imported perhaps, from where, after torch

    def program(self, target: Target) -> Program:
        assert target.source is not None
        for file in self._files(target.module or ""):
            self._read(file, Reach.SURE)
        self._read(os.path.abspath(target.source), Reach.SURE)
        imports_torch = self._torch
        while self._later:
            found, file, self._torch = self._later.popleft()
            for each in self._local(found, file):
                self._read(each, Reach.MAYBE)
        if not self._scans.complete:
            self._doubt = "its modules have more source than is read at once"
            from ddplaunch.preload.scan import needs_dynamo

            self._dynamo = any(map(needs_dynamo, source.local_sources(target.source, self._first)))
        self._scans.keep()
        statements, variables = tuple(self._statements), tuple(self._variables)
        return Program(statements, variables, imports_torch, self._seeds_first, self._dynamo, self._doubt)

    def _read(self, file: str, reach: Reach) -> None:
        if file in self._seen or len(self._seen) >= _MAX_FILES:
            return
        self._seen.add(file)
        said, dynamo = self._scans.of(file)
        self._dynamo = self._dynamo or dynamo
        for found in said:
            if isinstance(found, Doubt):
                self._doubt = self._doubt or f"{self._where(file)}:{found.line} {found.words}"
            elif isinstance(found, Seeding):
                self._seeded = self._seeded or min(reach, found.reach) is not Reach.MAYBE
            elif isinstance(found, Assignment):
                where = f"{self._where(file)}:{found.line}"
                self._variables.append(self._variable(found, where, min(reach, found.reach)))
            else:
                self._import(replace(found, reach=min(reach, found.reach)), file)

    def _where(self, file: str) -> str:
        return os.path.relpath(file, self._first)

    def _variable(self, found: Assignment, where: str, reach: Reach) -> Variable:
        sure = reach is Reach.SURE
        early = sure and not self._others
        return Variable(found.name, where, found.value if sure else None, found.default, self._torch, early)

    def _import(self, found: Import, file: str) -> None:
        if not found.level and found.module.partition(".")[0] in sys.stdlib_module_names:
            return
        if found.reach is Reach.MAYBE:
            self._later.append((found, file, self._torch))
            return
        if local := list(self._local(found, file)):
            for each in local:
                self._read(each, found.reach)
        elif not found.level and found.module.partition(".")[0] != "ddplaunch":
            self._statements.append(Statement(found.module, tuple(name for name in found.names if name != "*")))
            self._others = True
            self._seeds_first = self._seeds_first or self._seeded
            if found.reach is Reach.SURE and found.module.partition(".")[0] == TORCH:
                self._torch = True

    def _local(self, found: Import, file: str) -> Iterator[str]:
        """The files of the program's own that the statement runs."""
        base = found.module
        if found.level:
            package = os.path.relpath(os.path.dirname(file), self._first).split(os.sep)
            above = [part for part in package[: len(package) - found.level + 1] if part != "."]
            base = ".".join([*above, *([base] if base else [])])
        for name in [base, *(f"{base}.{each}" if base else each for each in found.names)]:
            yield from self._files(name)

    def _files(self, name: str) -> tuple[str, ...]:
        """The files of the program's own that importing ``name`` runs."""
        if name not in self._known:
            top, dot, _ = name.partition(".")
            absent = dot and not self._files(top) and not os.path.isdir(os.path.join(self._first, top))
            self._known[name] = () if absent or not name else tuple(source.files_of(name, self._first))
        return self._known[name]
