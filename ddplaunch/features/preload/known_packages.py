"""The table of known packages, known.json: which of their modules may be preloaded; and the installed versions.

The table is written by an audit, ``python -m tests.tools.preload_audit``; nothing is imported to read it.
docs/performance.md explains what an audit checks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.safe_files import list_dir
from ddplaunch.base.text import normalize_name
from ddplaunch.base.types import parse

TABLE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "known.json")
SITE_DIR_NAMES = frozenset({"site-packages", "dist-packages"})  # names of folders that packages are installed in

_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[\w.]+)?")
_DIST_INFO = re.compile(r"(.+?)-(.+)\.dist-info")


class KnownPackage(Struct, frozen=True):
    """One distribution of the table, with the fields of its JSON.

    Attributes:
        top: its top-level modules.
        versions: the audited versions; later ones of the same major version are accepted too.
        modules: the modules that may be preloaded, each with the words in a program's source that use it. Not every
            version has all modules.
        loads: the other distributions that its import loads, by name.
        tries: optional modules, which its import loads if they are installed.
        refused: why it must be imported in each rank; None if it may be preloaded.
    """

    top: Collection[str]
    versions: Collection[str]
    modules: Mapping[str, Collection[str]] = field(default_factory=dict)
    loads: Collection[str] = ()
    tries: Collection[str] = ()
    refused: str | None = None
    name: str = ""  # of the distribution: the key in the table

    @property
    def top_level_names(self) -> set[str]:
        """The first component of each module name in ``top``."""
        return {top.partition(".")[0] for top in self.top}


class PackageTable:
    """The contents of known.json; ``packages``: the audited packages, by name."""

    def __init__(self) -> None:
        with open(TABLE_FILE, "rb") as file:
            content = parse(file.read(), dict[str, KnownPackage])
        self.packages = {name: replace(each, name=name) for name, each in content.items()}
        self._by_top = {top: each for each in self.packages.values() for top in each.top}
        self.torch_parts = frozenset(name.replace("-", "_") for name in self.packages["torch"].loads)

    def find_package(self, module: str) -> KnownPackage | None:
        """Return the audited distribution that a module, or else its closest parent package, belongs to; or None."""
        while module and module not in self._by_top:
            module = module.rpartition(".")[0]
        return self._by_top.get(module)


class InstalledPackages:
    """The distributions in this interpreter's site-packages folders, by file names alone: no metadata is read."""

    def __init__(self) -> None:
        self._distributions: dict[str, tuple[str, str]] = {}  # version and folder, by name
        self._entries: dict[str, frozenset[str]] = {}  # the entries of each folder, up to the first dot
        for folder in dict.fromkeys(filter(is_site_dir, sys.path)):
            entries = list_dir(folder)
            self._entries[folder] = frozenset(each.partition(".")[0] for each in entries)
            for match in filter(None, map(_DIST_INFO.fullmatch, entries)):
                name = normalize_name(match[1])
                twice = name in self._distributions and self._distributions[name][1] == folder
                installed = ("?", folder) if twice else self._distributions.get(name, (match[2], folder))
                self._distributions[name] = installed

    def version(self, name: str) -> str | None:
        """Return the version of a distribution: None if it is not installed, "?" if one folder has several versions."""
        return self._distributions[name][0] if name in self._distributions else None

    def has_module(self, module: str) -> bool:
        """Whether the file of a module is installed; a folder without ``__init__.py`` does not count."""
        *parents, name = module.split(".")
        for folder in [each for each, entries in self._entries.items() if (parents or [name])[0] in entries]:
            inside = os.path.join(folder, *parents)
            files = [each for each in list_dir(inside) if each.startswith(f"{name}.") and each.endswith((".py", ".so"))]
            if files or os.path.isfile(os.path.join(inside, name, "__init__.py")):
                return True
        return False

    def why_unusable(self, package: KnownPackage, table: PackageTable) -> str | None:
        """Return why a package of the table cannot be preloaded in this installation; None if it can.

        Checked are its own version and those of the packages that its import loads (``loads``), or loads if they are
        installed (``tries``).
        """
        if why := package.refused or self.why_not_audited(package):
            return why
        loaded = [each for each in package.loads if each not in ("torch", package.name) and self.version(each)]
        parts = [(each, table.packages.get(each), False) for each in loaded]
        optional = filter(self.has_module, package.tries)
        parts += ((each.partition(".")[0], table.find_package(each), True) for each in optional)
        for other, part, is_optional in parts:
            if part is None:
                return f"imports {other}, which is not in the table"
            if why := (is_optional and part.refused) or self.why_not_audited(part):
                return f"imports {other}, which {why}"
        return None

    def why_not_audited(self, package: KnownPackage) -> str | None:
        """Return why the installed version of a package does not count as audited; None if it does."""
        version = self.version(package.name)
        if version is None:
            return "not installed as audited"
        if not is_audited_version(version, package.versions):
            return f"{version} has not been audited"
        folder = self._distributions[package.name][1]
        for name in package.top_level_names:
            first = next((each for each, entries in self._entries.items() if name in entries), None)
            if first != folder and (first is not None or name == next(iter(package.top))):
                return "not installed as audited"
        return None


def is_site_dir(folder: str) -> bool:
    """Whether a folder is a site-packages folder, by its name."""
    return os.path.basename(folder) in SITE_DIR_NAMES


def is_audited_version(version: str | None, audited: Collection[str]) -> bool:
    """Whether a version was audited, or is later than an audited one of the same major version."""
    release = _release_numbers(version or "")
    return version in audited or any(
        release[:1] == each[:1] and release >= each for each in map(_release_numbers, audited) if each
    )


def _release_numbers(version: str) -> list[int]:
    """Return the numbers of a release; none for a pre-release."""
    match = _VERSION.fullmatch(version)
    return [int(part) for part in match[1].split(".")] if match else []
