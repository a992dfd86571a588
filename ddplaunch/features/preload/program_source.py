"""Reads a program's source for hints: what it imports, and which environment variables it sets.

Nothing is executed. A wrong hint only costs time: a rank checks at each import whether the preloaded module fits
(``core/rank/module_handover.py``).
"""

from __future__ import annotations

import _ast as ast  # importing ast takes longer than reading most programs
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.features.preload.known_packages import SITE_DIR_NAMES
from ddplaunch.system.target import source
from ddplaunch.system.target.target import Target

TORCH = "torch"
NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)
"""Source text that suggests a use of ``torch._dynamo`` (which imports sympy too: a second in every rank)."""

_Found = tuple[int, str, str | None, bool]
"""An assignment to an environment variable: line, name, value if the source shows it, and whether it is a default."""

_MAX_FILES = 200  # the same as in ``source.local_sources``
_MAX_PARSED_BYTES = 512 << 10  # of the program's modules: parsing them takes about 100 ms


class Import(Struct, frozen=True):
    """``import module``, or ``from module import names``; ``is_deferred``: it is in a function."""

    module: str
    names: tuple[str, ...]
    is_deferred: bool

    @property
    def top_level_name(self) -> str:
        return self.module.partition(".")[0]


class Assignment(Struct, frozen=True):
    """A statement that sets an environment variable.

    Attributes:
        where: file and line, as "train.py:3".
        name: the variable.
        value: None if the source does not show it.
        is_default: it is set only if it was not set before.
        before_imports: no import from outside the standard library comes before it.
        before_torch: it is not in a function, and torch is imported later, if at all.
    """

    where: str
    name: str
    value: str | None
    is_default: bool
    before_imports: bool
    before_torch: bool


class ProgramSource(Struct, frozen=True):
    """The facts about a program's source that matter to preloading.

    Attributes:
        imports: of modules that are not the program's own, in order; those in functions come last.
        assignments: of environment variables.
        words: all words in its files: names, and words in strings and comments.
        imports_torch: it imports torch outside functions.
        dynamo: it matches ``NEEDS_DYNAMO``.
    """

    imports: tuple[Import, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    words: frozenset[str] = frozenset()
    imports_torch: bool = False
    dynamo: bool = False


def read_program(target: Target) -> ProgramSource:
    """Read the source of ``target``; an empty ``ProgramSource`` if there is none, as for a compiled module."""
    if target.source is None or target.sys_path_0 is None:
        return ProgramSource()
    return _ProgramReader(target.sys_path_0).read(os.path.abspath(target.source), target.module or "")


class _ProgramReader:
    """Reads the files of a program; the program's own modules are read where they are imported."""

    def __init__(self, sys_path_0: str) -> None:
        self._sys_path_0 = sys_path_0
        above = [sys_path_0, *(os.path.dirname(path) for path in (sys_path_0, os.path.dirname(sys_path_0)))]
        self._folders = [
            folder for each in above for folder in (each, os.path.join(each, "lib"), os.path.join(each, "src"))
        ]
        """Where a program that changes sys.path often has its modules."""
        self._seen: dict[str, bool] = {}  # by file: whether it was only read for an import in a function
        self._deferred: list[tuple[str, str, list[ast.stmt]]] = []  # bodies of functions, with their files
        self._parsed_bytes = 0
        self._imports: list[Import] = []
        self._assignments: list[Assignment] = []
        self._words: set[str] = set()
        self._imports_torch = self._uses_dynamo = False

    def read(self, path: str, module: str) -> ProgramSource:
        if module and (root := self._find_own_root(module.partition(".")[0])):
            for file in source.files_run_by_import(module, root):
                self._read_file(file, root, is_deferred=False)
        self._read_file(path, self._sys_path_0, is_deferred=False, is_program=True)
        for file, root, body in self._deferred:  # which grows
            with suppress(RecursionError):
                self._read_block(body, file, root, is_deferred=True, is_program=False)
        imports, assignments, words = tuple(self._imports), tuple(self._assignments), frozenset(self._words)
        return ProgramSource(imports, assignments, words, self._imports_torch, self._uses_dynamo)

    def _read_file(self, file: str, root: str, *, is_deferred: bool, is_program: bool = False) -> None:
        """Read a file unless it was read before; ``root``: the folder from which its module is imported."""
        if self._seen.get(file, 2) <= is_deferred:
            return
        self._seen[file] = is_deferred
        try:
            size = 0 if is_program else os.path.getsize(file)
            if len(self._seen) > _MAX_FILES or self._parsed_bytes + size > _MAX_PARSED_BYTES:
                return
            self._parsed_bytes += size
            text = read_regular_file(file, source.MAX_SOURCE).decode(errors="replace")
            self._uses_dynamo = self._uses_dynamo or bool(NEEDS_DYNAMO.search(text))
            self._words.update(re.findall(r"[^\W\d]\w*", text))
            body = source.parse_file(file).body
            self._read_block(body, file, root, is_deferred=is_deferred, is_program=is_program)
        except (OSError, UsageError, RecursionError):  # the rank that imports it shows the error
            return

    def _read_block(self, body: list[ast.stmt], file: str, root: str, *, is_deferred: bool, is_program: bool) -> None:
        for node in body:
            match node:
                case ast.Import():
                    for alias in node.names:
                        self._add_import(alias.name, (), 0, file, root, is_deferred)
                case ast.ImportFrom():
                    names = tuple(alias.name for alias in node.names if alias.name != "*")
                    self._add_import(node.module or "", names, node.level, file, root, is_deferred)
                case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
                    if is_program:
                        self._read_block(node.body, file, root, is_deferred=is_deferred, is_program=True)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._deferred.append((file, root, node.body))
                case ast.ClassDef() | ast.With() | ast.AsyncWith() | ast.Try():
                    blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
                    blocks += [handler.body for handler in getattr(node, "handlers", [])]
                    for block in blocks:
                        self._read_block(block, file, root, is_deferred=is_deferred, is_program=is_program)
                case ast.If() | ast.For() | ast.While() | ast.Match():
                    for assignment in _find_assignments(node):  # its imports are left out: it may not be executed
                        self._add_assignment(file, *assignment, is_certain=False, is_deferred=is_deferred)
                case _:
                    for assignment in _find_assignments(node):
                        self._add_assignment(file, *assignment, is_certain=True, is_deferred=is_deferred)

    def _add_assignment(
        self,
        file: str,
        line: int,
        name: str,
        value: str | None,
        is_default: bool,
        *,
        is_certain: bool,
        is_deferred: bool,
    ) -> None:
        where = f"{os.path.relpath(file, self._sys_path_0)}:{line}"
        before_torch = not (is_deferred or self._imports_torch)
        shown = value if is_certain and not is_deferred else None
        is_first = before_torch and not self._imports
        self._assignments.append(Assignment(where, name, shown, is_default, is_first, before_torch))

    def _add_import(
        self, module: str, names: tuple[str, ...], level: int, file: str, root: str, is_deferred: bool
    ) -> None:
        if level:
            package = os.path.relpath(os.path.dirname(file), root).split(os.sep)
            module = ".".join(filter(None, [*package[: len(package) + 1 - level], module])).strip(".")
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top == "ddplaunch":
            return
        names_of_modules = [module, *(f"{module}.{each}" for each in names)]
        own_root = root if level else self._find_own_root(top)
        own = [file for each in names_of_modules if own_root for file in source.files_run_by_import(each, own_root)]
        for each in own:
            self._read_file(each, own_root or "", is_deferred=is_deferred)
        if not own and not level:
            self._imports.append(Import(module, names, is_deferred))
            self._imports_torch = self._imports_torch or (top == TORCH and not is_deferred)

    def _find_own_root(self, top: str) -> str | None:
        """Return the folder with the program's own module ``top``; None if ``top`` is not one of its own modules."""
        if next(source.files_run_by_import(top, self._sys_path_0), None):
            return self._sys_path_0
        if (spec := source.find_module(top, "")) is None:
            return next((each for each in self._folders if next(source.files_run_by_import(top, each), None)), None)
        path = [*(spec.submodule_search_locations or ()), spec.origin or ""][0]
        folder = os.path.dirname(path)
        is_installed = not SITE_DIR_NAMES.isdisjoint(folder.split(os.sep)) or top == TORCH
        is_stdlib = not os.path.isabs(path) or folder.startswith(os.path.dirname(os.__file__))
        return None if is_installed or is_stdlib else folder


def _find_assignments(node: ast.AST) -> Iterator[_Found]:
    """Find where environment variables are set in a statement."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=mapping, slice=key)], value=value) if _is_environ(mapping):
            yield from _iter_assignment(node, key, value)
        case ast.Call(func=ast.Attribute(value=mapping, attr="setdefault"), args=[key, value]) if _is_environ(mapping):
            yield from _iter_assignment(node, key, value, is_default=True)
        case ast.AugAssign(target=mapping, value=ast.Dict() as added) if _is_environ(mapping):
            for each, new in zip(added.keys, added.values, strict=True):
                yield from _iter_assignment(node, each, new)
        case ast.Call(func=ast.Attribute(value=mapping, attr="update"), args=args) if _is_environ(mapping):
            for each in args:
                for key, value in zip(getattr(each, "keys", ()), getattr(each, "values", ()), strict=True):
                    yield from _iter_assignment(node, key, value)
            for keyword in node.keywords:
                yield from _iter_assignment(node, ast.Constant(keyword.arg), keyword.value)
    for name in node._fields:
        found = getattr(node, name, None)
        for below in found if isinstance(found, list) else [found]:
            if isinstance(below, ast.AST) and not isinstance(below, ast.FunctionDef | ast.Lambda):
                yield from _find_assignments(below)


def _iter_assignment(node: Any, key: object, value: object, *, is_default: bool = False) -> Iterator[_Found]:
    name = getattr(key, "value", None)
    text = value.value if isinstance(value, ast.Constant) else None
    if isinstance(name, str):
        yield node.lineno, name, text if isinstance(text, str) else None, is_default


def _is_environ(node: ast.AST) -> bool:
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))
