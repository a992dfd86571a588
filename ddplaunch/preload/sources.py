"""What importing an installed package that is not in the table may do to later imports, by the package's sources."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

from ddplaunch.errors import UsageError
from ddplaunch.files import read_regular_file
from ddplaunch.preload.facts import (
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
from ddplaunch.preload.scan import scan_source
from ddplaunch.preload.table import list_dir
from ddplaunch.target import source

_MAX_FILES, _MAX_PARSED, _MAX_BINARY = 500, 4 << 20, 32 << 20  # of one import; they take up to half a second
_IN_BINARY = re.compile(rb"\0(?:setenv|putenv)\0|meta_path|path_hooks|setdlopenflags|setLoggerClass")


class Sources:
    """The sources of the packages that are installed."""

    def __init__(self, is_known: Callable[[str], bool], reads: Callable[[str], bool]) -> None:
        """``is_known``: a module is audited, and need not be read; ``reads``: an audited import reads a variable."""
        self._is_known, self._reads = is_known, reads
        self._root = lru_cache(maxsize=None)(find_root)

    def find_interference(self, module: str, names: tuple[str, ...]) -> str | None:
        """Say how importing a module may change what is imported later; None where it cannot."""
        todo = list(self._files(Import("", Certainty.CERTAIN, module, names), ""))
        seen, sizes = set[str](), {True: 0, False: 0}
        for file, root in todo:  # which grows
            if file in seen:
                continue
            seen.add(file)
            name, is_source = os.path.relpath(file, root), file.endswith(".py")
            package = os.path.dirname(name).replace(os.sep, ".")
            try:
                sizes[is_source] += os.path.getsize(file)
                if len(seen) > _MAX_FILES or sizes[True] > _MAX_PARSED or sizes[False] > _MAX_BINARY:
                    return f"{name} is more than is read at once"
                if not is_source:
                    if found := _IN_BINARY.search(read_regular_file(file, _MAX_BINARY)):
                        return f"{name} uses {found[0].decode().strip(chr(0))}"
                    continue
                findings = scan_source(source.parse_file(file), file, name)
            except (OSError, UsageError, RecursionError):
                return f"{name} cannot be read"
            for each in findings:
                if isinstance(each, Import):
                    todo += self._files(each, package)
                elif why := self._why(each, name.partition(os.sep)[0]):
                    return f"{each.where} {why}"
        return None

    def _why(self, found: Statement, top: str) -> str | None:
        """Why a finding in a package's file matters to others; what is in functions runs only where it is called."""
        runs = found.certainty > Certainty.DEFERRED
        if isinstance(found, Barrier):
            return found.reason if runs or found.hook else None
        if isinstance(found, Use) and runs and not (found.source.level or found.source.top_level_name == top):
            configures = found.verb == CONFIGURES and self._is_known(found.source.module)
            return found.reason if configures or found.verb == CHANGES else None
        if isinstance(found, Assignment) and found.source is None:
            return found.reason if (runs if found.name is None else self._reads(found.name)) else None
        if isinstance(found, PathEntry):
            return "changes sys.path" if runs else None
        return None

    def _files(self, found: Import, package: str) -> Iterator[tuple[str, str]]:
        """The files that an import in a package runs, source and native code, each with where it is installed."""
        for module in found.modules(package) if found.certainty > Certainty.DEFERRED else ():
            top = module.partition(".")[0]
            if not (top in sys.stdlib_module_names or self._is_known(module)) and (root := self._root(top)):
                folder, stem = os.path.split(os.path.join(root, *module.split(".")))
                native = [each for each in list_dir(folder) if each.startswith(f"{stem}.") and each.endswith(".so")]
                yield from ((file, root) for file in source.import_files(module, root))
                yield from ((os.path.join(folder, file), root) for file in native)


def find_root(top: str, first: str = "") -> str | None:
    """The folder in which a top-level module stands, in ``first`` or on ``sys.path``; None where it is not."""
    found = source.find_module(top, first)
    place = found and [*(found.submodule_search_locations or ()), found.origin or ""][0]
    return os.path.dirname(place) if place and os.path.isabs(place) else None  # not one that is built in
