"""Reads the sources of installed packages that are not in the table: whether importing one may affect later imports."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import list_dir, read_regular_file
from ddplaunch.features.preload.source_scanner import scan_source
from ddplaunch.features.preload.statements import (
    CHANGES,
    CONFIGURES,
    Assignment,
    Barrier,
    Certainty,
    Import,
    PathEntry,
    Statement,
    Use,
)
from ddplaunch.system.target import source

_MAX_FILES, _MAX_SOURCE_BYTES, _MAX_NATIVE_BYTES = 500, 4 << 20, 32 << 20  # of one import: up to half a second
_NATIVE_PATTERN = re.compile(rb"\0(?:setenv|putenv)\0|meta_path|path_hooks|setdlopenflags|setLoggerClass")


class Sources:
    """The sources of installed packages."""

    def __init__(self, is_known: Callable[[str], bool], is_variable_read: Callable[[str], bool]) -> None:
        """``is_known``: a module need not be read; ``is_variable_read``: a known import reads a variable."""
        self._is_known, self._is_variable_read = is_known, is_variable_read
        self._root = lru_cache(maxsize=None)(find_root)

    def find_interference(self, module: str, names: tuple[str, ...]) -> str | None:
        """Return how importing a module may affect later imports, as "lib.py:3 changes sys.path"; None if it cannot."""
        todo = list(self._files(Import("", Certainty.CERTAIN, module, names), ""))
        seen, sizes = set[str](), {True: 0, False: 0}  # bytes by ``is_source``
        for file, root in todo:  # grows in the loop
            if file in seen:
                continue
            seen.add(file)
            name, is_source = os.path.relpath(file, root), file.endswith(".py")
            package = os.path.dirname(name).replace(os.sep, ".")
            try:
                sizes[is_source] += os.path.getsize(file)
                if len(seen) > _MAX_FILES or sizes[True] > _MAX_SOURCE_BYTES or sizes[False] > _MAX_NATIVE_BYTES:
                    return f"{name} is too large to be scanned"
                if not is_source:
                    if match := _NATIVE_PATTERN.search(read_regular_file(file, _MAX_NATIVE_BYTES)):
                        return f"{name} uses {match[0].decode().strip(chr(0))}"
                    continue
                statements = scan_source(source.parse_file(file), file, name)
            except (OSError, UsageError, RecursionError):
                return f"{name} cannot be read"
            for each in statements:
                if isinstance(each, Import):
                    todo += self._files(each, package)
                elif why := self._why_interferes(each, name.partition(os.sep)[0]):
                    return f"{each.where} {why}"
        return None

    def _why_interferes(self, statement: Statement, top: str) -> str | None:
        """Return why a statement of package ``top`` may affect imports of others; None if it does not.

        A statement in a function runs only if the function is called.
        """
        runs = statement.certainty > Certainty.DEFERRED
        if isinstance(statement, Barrier):
            return statement.reason if runs or statement.hook else None
        if isinstance(statement, Use) and runs:
            if statement.source.level or statement.source.top_level_name == top:
                return None  # the package uses its own modules
            configures = statement.verb == CONFIGURES and self._is_known(statement.source.module)
            return statement.reason if configures or statement.verb == CHANGES else None
        if isinstance(statement, Assignment) and statement.source is None:
            matters = runs if statement.name is None else self._is_variable_read(statement.name)
            return statement.reason if matters else None
        if isinstance(statement, PathEntry):
            return "changes sys.path" if runs else None
        return None

    def _files(self, step: Import, package: str) -> Iterator[tuple[str, str]]:
        """The source and native files that an import in ``package`` runs, each with its ``sys.path`` folder."""
        for module in step.modules(package) if step.certainty > Certainty.DEFERRED else ():
            top = module.partition(".")[0]
            if not (top in sys.stdlib_module_names or self._is_known(module)) and (root := self._root(top)):
                folder, stem = os.path.split(os.path.join(root, *module.split(".")))
                native = [each for each in list_dir(folder) if each.startswith(f"{stem}.") and each.endswith(".so")]
                yield from ((file, root) for file in source.import_files(module, root))
                yield from ((os.path.join(folder, file), root) for file in native)


def find_root(top: str, sys_path_0: str = "") -> str | None:
    """Return the folder that has a top-level module, ``sys_path_0`` or one of ``sys.path``; None if there is none."""
    spec = source.find_module(top, sys_path_0)
    path = spec and [*(spec.submodule_search_locations or ()), spec.origin or ""][0]
    return os.path.dirname(path) if path and os.path.isabs(path) else None  # not absolute: built in
