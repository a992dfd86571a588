"""Reading Python source without running it: parsing a file, finding a module, following local imports.

Python's own import system runs the parents of a dotted name to find it; these functions ask the finders instead.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec

from ddplaunch.errors import UsageError


def parse(path: str, shown: str | None = None) -> ast.Module:
    """Return the syntax tree of the file at ``path``, called ``shown`` in errors.

    Raises:
        UsageError: it cannot be read, or is not Python; a syntax error is shown with its line.
    """
    shown = shown or path
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}") from None
    try:
        return ast.parse(source, path)
    except SyntaxError as error:
        line = (error.text or "").strip()
        where = f"{shown}, line {error.lineno}" if error.lineno else shown
        raise UsageError(f"syntax error in {where}: {error.msg}", line or None) from None
    except ValueError as error:  # null bytes
        raise UsageError(f"{shown} is not Python source: {error}") from None


def find_module(name: str, first: str) -> ModuleSpec | None:
    """Find the dotted module ``name`` as ``import`` would with ``first`` in front of ``sys.path``; None if there is none.

    Only finders are asked: neither the module nor its parent packages run. What ``sys.modules`` holds is the
    launcher's own and is not looked at.
    """
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        full = ".".join(parts[: depth + 1])
        if depth == 0:
            spec = _ask_finders(full, [first]) or _ask_finders(full, None)
        else:
            spec = _ask_finders(full, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # a finder of somebody else's that cannot cope with our question
            continue
        if spec is not None and (spec.origin is not None or spec.submodule_search_locations is not None):
            if path is not None and spec.origin in ("built-in", "frozen"):
                continue
            return spec
    return None


def local_sources(path: str, first: str) -> Iterator[str]:
    """Yield the text of the file at ``path`` and of every file below the folder ``first`` that it imports.

    Follows ``import`` statements wherever they stand, without running anything; what cannot be read is passed over.
    """
    todo, seen = [os.path.abspath(path)], set[str]()
    while todo:
        file = todo.pop()
        if file in seen or len(seen) >= _MOST_FILES:
            continue
        seen.add(file)
        try:
            with open(file, encoding="utf-8", errors="replace") as opened:
                text = opened.read()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        yield text
        for name in _imported_names(tree, file, first):
            todo.extend(_files_of(name, first))


_MOST_FILES = 200
"""Past this many files the answer will not change any more, and a launcher should be quick."""


def _imported_names(tree: ast.Module, file: str, first: str) -> Iterator[str]:
    package = os.path.relpath(os.path.dirname(file), first).replace(os.sep, ".")
    package = "" if package == "." or package.startswith("..") else package
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            for alias in node.names:
                yield f"{base}.{alias.name}" if base else alias.name


def _files_of(name: str, first: str) -> Iterator[str]:
    place = os.path.join(first, *name.split("."))
    for candidate in (place + ".py", os.path.join(place, "__init__.py")):
        if os.path.isfile(candidate):
            yield candidate
