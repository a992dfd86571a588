"""What importing an installed package that is not in the table may do to later imports, by the package's sources."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator

from ddplaunch.errors import UsageError
from ddplaunch.files import read_regular
from ddplaunch.preload.facts import Assignment, Barrier, Finding, Folder, Import, Logger, Patch, Reach
from ddplaunch.preload.scan import scan
from ddplaunch.target import source

_MAX_FILES, _MAX_PARSED, _MAX_BINARY = 500, 4 << 20, 32 << 20  # of one import; they take up to half a second
_IN_BINARY = re.compile(rb"\0(?:setenv|putenv)\0|meta_path|path_hooks|setdlopenflags|setLoggerClass")


class Sources:
    """The sources of the packages that are installed."""

    def __init__(self, is_known: Callable[[str], bool], reads: Callable[[str], bool]) -> None:
        """``is_known``: a module is audited, and need not be read; ``reads``: an audited import reads a variable."""
        self._is_known, self._reads = is_known, reads
        self._roots: dict[str, str | None] = {}

    def find_interference(self, module: str, names: tuple[str, ...]) -> str | None:
        """Say how importing a module may change what is imported later; None where it cannot."""
        todo = list(self._imported(Import("", Reach.SURE, module, names), ""))
        seen, parsed, binary = set[str](), 0, 0
        for file, package, root in todo:  # which grows
            if file in seen:
                continue
            seen.add(file)
            name = os.path.relpath(file, root)
            try:
                size = os.path.getsize(file)
                parsed, binary = (parsed + size, binary) if file.endswith(".py") else (parsed, binary + size)
                if len(seen) > _MAX_FILES or parsed > _MAX_PARSED or binary > _MAX_BINARY:
                    return f"{name} is more than is read at once"
                if not file.endswith(".py"):
                    if found := _IN_BINARY.search(read_regular(file, _MAX_BINARY)):
                        return f"{name} uses {found[0].decode().strip(chr(0))}"
                    continue
                findings = scan(source.parse(file), file, name)
            except (OSError, UsageError):
                return f"{name} cannot be read"
            for each in findings:
                if isinstance(each, Import):
                    todo += self._imported(each, package)
                elif why := self._why(each, package.partition(".")[0]):
                    return f"{each.where} {why}"
        return None

    def _why(self, found: Finding, top: str) -> str | None:
        """Why a finding in a package's file matters to others; what is in functions runs only where it is called."""
        runs = found.reach > Reach.LATER
        if isinstance(found, Barrier):
            return found.words if runs or found.hook else None
        if isinstance(found, Patch):
            own = found.source is not None and (found.source.level or found.source.top == top)
            return found.words if runs and not own and not found.passed else None
        if isinstance(found, Assignment):
            matters = runs if found.name is None else self._reads(found.name)
            return f"sets {found.name or 'variables'}" if matters else None
        if isinstance(found, Folder):
            return "changes sys.path" if runs else None
        if isinstance(found, Logger) and runs and found.top != top:
            return found.words if self._is_known(found.name) else None
        return None

    def _imported(self, found: Import, package: str) -> Iterator[tuple[str, str, str]]:
        for name in found.modules(package) if found.reach > Reach.LATER else ():
            yield from self._files(name)

    def _files(self, module: str) -> Iterator[tuple[str, str, str]]:
        """The files that importing a module runs, each with the package that it is in, and where that is installed."""
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or self._is_known(module) or (root := self._root(top)) is None:
            return
        parts = module.split(".")
        folder = root
        for depth, part in enumerate(parts):
            folder = os.path.join(folder, part)
            if os.path.isfile(init := os.path.join(folder, "__init__.py")):
                yield init, ".".join(parts[: depth + 1]), root
            else:
                package = ".".join(parts[:depth])
                yield from ((file, package, root) for file in _modules(folder))

    def _root(self, top: str) -> str | None:
        """Where a top-level module is installed; None where it is not."""
        if top not in self._roots:
            found = source.find_module(top, "")
            place = found and [*(found.submodule_search_locations or ()), found.origin or ""][0]
            self._roots[top] = os.path.dirname(place) if place and os.path.isabs(place) else None
        return self._roots[top]


def _modules(path: str) -> list[str]:
    """The file of a module: source, or native code."""
    if os.path.isfile(path + ".py"):
        return [path + ".py"]
    folder, stem = os.path.split(path)
    try:
        names = [each for each in os.listdir(folder) if each.startswith(stem + ".") and each.endswith(".so")]
    except OSError:
        return []
    return [os.path.join(folder, each) for each in names]
