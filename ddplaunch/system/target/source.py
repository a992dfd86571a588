"""Reads Python source without running it: parses files, finds modules, follows local imports.

Python's own import system runs the parents of a dotted name to find it; these functions ask the finders instead.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import MAGIC_NUMBER

from ddplaunch.base.errors import UsageError, truncate_line
from ddplaunch.base.safe_files import read_regular_file

_ONLY_TREE = 0x400  # ast.PyCF_ONLY_AST


def parse_file(path: str, name: str | None = None) -> ast.Module:
    """Return the syntax tree of the file at ``path``, called ``name`` in errors.

    Raises UsageError if it cannot be read, or is not Python; a syntax error is shown with its line.
    """
    name = name or path
    try:
        source = read_regular_file(path, MAX_SOURCE)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    if b"\0" in source:
        raise UsageError(f"{name} is not Python source: it contains a null byte", _suggest_no_python(path, name))
    try:
        return _parse_tree(source, path)
    except SyntaxError as error:
        hint = _suggest_no_python(path, name) or truncate_line((error.text or "").strip(), 100) or None
        where = f"{name}, line {error.lineno}" if error.lineno else name
        raise UsageError(f"syntax error in {where}: {error.msg}", hint) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{name} is not Python source: {error}") from None


def check_compiled(path: str, name: str) -> None:
    """Check that compiled code can be read and is of this Python version. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            found = file.read(len(MAGIC_NUMBER))
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    if found != MAGIC_NUMBER:
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(f"{name} was not compiled by this {version}", "compile it again: python -m py_compile")


@lru_cache(maxsize=1)
def _parse_tree(source: bytes | str, path: str) -> ast.Module:
    with warnings.catch_warnings():  # shown by the ranks
        warnings.simplefilter("ignore")
        # As ast.parse does; to load ast takes longer than to parse most programs.
        tree: ast.Module = compile(source, path, "exec", _ONLY_TREE, dont_inherit=True)
        return tree


def _suggest_no_python(path: str, name: str) -> str | None:
    if path.endswith(".py") or not os.access(path, os.X_OK):
        return None
    program = name if os.sep in name else os.path.join(".", name)
    return f"for a program that is not Python: ddplaunch run --no-python {program}"


def find_module(name: str, first: str) -> ModuleSpec | None:
    """Find a dotted module like ``import``, in the folder ``first`` before ``sys.path``; None if there is none.

    Only finders are asked: neither the module nor its parent packages run. What ``sys.modules`` holds is the
    launcher's own and is not looked at.
    """
    folders: Sequence[str | None] = (first, None)  # None is sys.path and the built-in modules
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        full = ".".join(parts[: depth + 1])
        spec = next((found for folder in folders if (found := _find_regular_module(full, folder))), None)
        if spec is None:
            named = [os.path.join(folder, parts[depth]) for folder in folders if folder is not None]
            spec = _find_namespace(
                full, named if depth else [*named, *(os.path.join(folder, full) for folder in sys.path)]
            )
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _find_regular_module(name: str, folder: str | None) -> ModuleSpec | None:
    """Return the regular module or package ``name`` in ``folder``; None is ``sys.path``."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, None if folder is None else [folder])
        except Exception:  # a finder of another package that does not support this call
            continue
        if spec is None or spec.origin is None or (folder is not None and spec.origin in ("built-in", "frozen")):
            continue
        return spec
    return None


def _find_namespace(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Find a namespace package: all folders of its name. Python's own finder would import its parent."""
    existing = [folder for folder in folders if os.path.isdir(folder)]
    if not existing:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = existing
    return spec


def local_sources(path: str, first: str) -> Iterator[str]:
    """Yield the text of the file at ``path`` and of every file below the folder ``first`` that it imports.

    Follows what looks like an import statement, wherever it stands: parsing a large project would take a second.
    What cannot be read is passed over.
    """
    todo, seen = [os.path.abspath(path)], set[str]()
    while todo:
        file = todo.pop()
        if file in seen or len(seen) >= _MAX_FILES:
            continue
        seen.add(file)
        try:
            text = read_regular_file(file, MAX_SOURCE).decode(errors="replace")
        except OSError:
            continue
        yield text
        for name in _imported_names(text, file, first):
            todo.extend(files_run_by_import(name, first))


MAX_SOURCE = 64 << 20  # bytes of a source file, at most: generated ones have some megabytes
_MAX_FILES = 200  # more files rarely change the result, and the launcher must start quickly
_COMMENT = r"#[^\n]*"
_IMPORT = (
    r"(?m)(?:^|[:;])[ \t]*(?:from[ \t]*(?P<dots>\.*)(?P<base>[\w.]*)[ \t]*)?"
    r"\bimport\b[ \t]*(?P<names>\([^)]*\)|[^\n;]+)"
)


def _imported_names(text: str, file: str, first: str) -> Iterator[str]:
    """Return the modules that a file imports; relative imports are resolved against the folder ``first``."""
    package = os.path.relpath(os.path.dirname(file), first).split(os.sep)
    for match in re.finditer(_IMPORT, re.sub(_COMMENT, "", text).replace("\\\n", " ")):
        dots = match["dots"]
        above = [part for part in package[: len(package) - len(dots) + 1] if part != "."] if dots else []
        base = ".".join([*above, *([match["base"]] if match["base"] else [])])
        if base:
            yield base
        for part in match["names"].strip("()").split(","):
            if name := part.split()[:1]:
                yield f"{base}.{name[0]}" if base else name[0]


def files_run_by_import(name: str, first: str) -> Iterator[str]:
    """Return the files that importing ``name`` runs: its own and the ``__init__.py`` of each parent package."""
    folder = first
    for part in name.split("."):
        folder = os.path.join(folder, part)
        for candidate in (os.path.join(folder, "__init__.py"), folder + ".py"):
            if os.path.isfile(candidate):
                yield candidate


def find_option_names(tree: ast.Module) -> frozenset[str]:
    """Return the options, with dashes, that a program's file names.

    Parsers like argparse need them in quotes; dataclass parsers, fire and typer make them from annotated fields and
    parameters.
    """
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-"):
            names.update(node.value.split("/"))  # click: "--dry-run/--no-dry-run"
        elif isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names.update(f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name))
        elif isinstance(node, ast.arg):
            names.add(f"--{node.arg.replace('_', '-')}")
    return frozenset(names)
