"""Reads a program's source: its imports, and the statements that affect them, in the order in which they would run.

Nothing is executed. ``scan_source`` reads one file; here the program's own files are inlined where they are imported.
Its own files are those that are neither in the standard library nor in site-packages.
"""

from __future__ import annotations

import os
import re
import sys

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.features.preload.known_packages import SITE_DIR_NAMES
from ddplaunch.features.preload.source_scanner import scan_source
from ddplaunch.features.preload.sources import find_root
from ddplaunch.features.preload.statements import (
    Assignment,
    Barrier,
    Certainty,
    Import,
    PathEntry,
    Statement,
    Step,
    Use,
)
from ddplaunch.system.target import source
from ddplaunch.system.target.target import Target

TORCH = "torch"
NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)
"""Source text that suggests a use of ``torch._dynamo`` (which imports sympy too: a second in every rank)."""

_MAX_FILES = 200  # the same as in ``source.local_sources``
_ARCHIVES = (".zip", ".whl", ".egg", ".pyz")
_MAX_PARSED_BYTES = 512 << 10  # of the program's modules: parsing them takes about 100 ms


class ProgramSource(Struct, frozen=True):
    """The source of a program, as far as it matters to preloading.

    Attributes:
        steps: its imports and the statements that affect imports, in order.
        folders: what it adds to ``sys.path``.
        words: all words in its files, names and those in strings.
        imports_torch: it certainly imports torch.
        dynamo: it matches ``NEEDS_DYNAMO``.
    """

    steps: tuple[Step, ...] = ()
    folders: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    imports_torch: bool = False
    dynamo: bool = False


def read_program(target: Target) -> ProgramSource:
    """Read the source of ``target``; an empty ``ProgramSource`` if there is none, as for a compiled module."""
    if target.source is None or target.sys_path_0 is None:
        return ProgramSource()
    return _ProgramReader(target.sys_path_0).program(os.path.abspath(target.source), target.module or "")


class _ProgramReader:
    def __init__(self, sys_path_0: str) -> None:
        self._sys_path_0 = sys_path_0
        self._statements: dict[str, tuple[Statement, ...]] = {}  # by file
        self._inlined: dict[str, Certainty] = {}  # the files that were gone through, and with what certainty
        self._parsed_bytes = 0
        self._roots: dict[str, str] = {}  # by file: the ``sys.path`` folder of its package
        self._module_files: dict[str, tuple[str, ...]] = {}  # by module
        self._steps: list[Step] = []
        self._folders: list[str] = []
        self._words: set[str] = set()
        self._imports_torch = self._imports_installed = self._uses_dynamo = False

    def program(self, path: str, module: str) -> ProgramSource:
        for file in self._list_imported_files(module):
            self._read(file, Certainty.CERTAIN)
        self._read(path, Certainty.CERTAIN, is_program=True)
        steps, folders, words = tuple(self._steps), tuple(self._folders), frozenset(self._words)
        return ProgramSource(steps, folders, words, self._imports_torch, self._uses_dynamo)

    def _read(self, file: str, certainty: Certainty, *, is_program: bool = False) -> None:
        """Go through a file, unless that was done for an import that is at least as certain."""
        if self._inlined.get(file, -1) >= certainty:
            return
        self._inlined[file] = certainty
        if file not in self._statements:
            self._statements[file] = self._scan(file, is_program)
        for statement in self._statements[file]:
            self._add(replace(statement, certainty=statement.certainty.nested_in(certainty)), file)

    def _scan(self, file: str, is_program: bool) -> tuple[Statement, ...]:
        name = os.path.relpath(file, self._sys_path_0)
        try:
            size = 0 if is_program else os.path.getsize(file)
            if len(self._statements) >= _MAX_FILES or self._parsed_bytes + size > _MAX_PARSED_BYTES:
                return (Barrier(f"{name}:1", Certainty.CERTAIN, "is too large to be scanned"),)
            self._parsed_bytes += size
            text = read_regular_file(file, source.MAX_SOURCE).decode(errors="replace")
            statements = scan_source(source.parse_file(file), file, name, shared=not is_program)
        except (OSError, UsageError, RecursionError):  # the rank that imports it shows the error
            return (Barrier(f"{name}:1", Certainty.CERTAIN, "cannot be read"),)
        self._uses_dynamo = self._uses_dynamo or bool(NEEDS_DYNAMO.search(text))
        self._words.update(re.findall(r"[^\W\d]\w*", text))
        return statements

    def _add(self, statement: Statement, file: str) -> None:
        """Add a statement of a file to the steps; one that imports a file of the program's own is replaced by that."""
        if isinstance(statement, Assignment | Use) and statement.source and self._is_own(statement.source, file):
            return
        if isinstance(statement, Import):
            self._add_import(statement, file)
        elif isinstance(statement, PathEntry):
            self._folders.append(statement.path)
            if os.path.isfile(statement.path) or statement.path.endswith(_ARCHIVES):
                self._steps.append(Barrier(statement.where, statement.certainty, "adds an archive to sys.path"))
        elif isinstance(statement, Assignment):
            is_certain = statement.certainty is Certainty.CERTAIN
            assignment = replace(
                statement,
                value=statement.value if is_certain else None,
                after_torch=self._imports_torch,
                before_imports=is_certain and not self._imports_installed,
            )
            self._steps.append(assignment)
        else:
            self._steps.append(statement)

    def _add_import(self, step: Import, file: str) -> None:
        top = step.top_level_name
        if not step.level and (top in sys.stdlib_module_names or top == "ddplaunch"):
            return
        # torch is never inlined, wherever it is installed, unless the program's folder has a module of that name.
        may_be_own = step.level or top != TORCH or self._find_own_root(top) == self._sys_path_0
        if own_files := self._own_files(step, file) if may_be_own else []:
            for each in own_files:
                self._read(each, step.certainty)
        elif not step.level:
            names = tuple(name for name in step.names if name != "*")
            self._steps.append(replace(step, names=names))
            if step.certainty > Certainty.DEFERRED:
                self._imports_installed = True
            if step.certainty is Certainty.CERTAIN and top == TORCH:
                self._imports_torch = True

    def _is_own(self, step: Import, file: str) -> bool:
        """Whether a statement imports a module of the program's own, or ddplaunch."""
        return bool(step.level or step.module == "ddplaunch" or self._own_files(step, file))

    def _own_files(self, step: Import, file: str) -> list[str]:
        """The program's own files that an import statement in ``file`` runs."""
        root = self._roots.get(file, self._sys_path_0) if step.level else None
        package = os.path.relpath(os.path.dirname(file), root).replace(os.sep, ".").strip(".") if root else ""
        return [each for name in step.modules(package) for each in self._list_imported_files(name, root)]

    def _list_imported_files(self, name: str, root: str | None = None) -> tuple[str, ...]:
        """The program's own files that importing ``name`` runs; ``root``: its ``sys.path`` folder, if known."""
        if name not in self._module_files:
            top = name.partition(".")[0]
            root = root or self._find_own_root(top) or ""
            self._module_files[name] = tuple(source.import_files(name, root)) if root and name else ()
            self._roots = {**dict.fromkeys(self._module_files[name], root), **self._roots}
        return self._module_files[name]

    def _find_own_root(self, top: str) -> str | None:
        """Return the folder that has the program's own module of this name; None if it has none."""
        for folder in (self._sys_path_0, *self._folders):
            if next(source.import_files(top, folder), None):
                return folder
        root = find_root(top, self._sys_path_0) if top and top not in sys.stdlib_module_names else None
        if root is None or not SITE_DIR_NAMES.isdisjoint(root.split(os.sep)):
            return None
        return None if root.startswith(os.path.dirname(os.__file__)) else root
