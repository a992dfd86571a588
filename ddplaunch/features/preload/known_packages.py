"""The table of known packages, known.json: which of their modules may be preloaded; and the installed versions.

The table is written by an audit, ``python -m tests.preload_audit``; nothing is imported to read it. docs/performance.md
explains what an audit checks.
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
            version has all of them.
        order: "free" if its import has the same result at any position in a program; "bound" if it must come before
            the first side effect.
        minds: global settings that a "free" package depends on (keys of ``import_selector.GLOBAL_SETTINGS_WORDS``).
        variables: environment variables that its import reads, also in the modules that it loads.
        sets: environment variables that its import sets.
        loads: the other distributions that its import loads, by name.
        companions: distributions that change what its import does; with one of them installed it is not preloaded.
        generators: its random generators, which are seeded again after a fork (features/preload/rank/fork_fixups.py).
        settings: its attributes that a program may assign to, because no import reads them.
        tries: optional modules, which its import loads if they are installed.
        seeks: modules that its import only searches for, without loading them.
        refused: why it must be imported in each rank; None if it may be preloaded.
    """

    top: Collection[str]
    versions: Collection[str]
    modules: Mapping[str, Collection[str]] = field(default_factory=dict)
    order: str = "bound"
    minds: Collection[str] = ()
    variables: Collection[str] = ()
    sets: Collection[str] = ()
    loads: Collection[str] = ()
    companions: Collection[str] = ()
    generators: Collection[str] = ()
    settings: Collection[str] = ()
    tries: Collection[str] = ()
    seeks: Collection[str] = ()
    refused: str | None = None
    name: str = ""  # of the distribution: the key in the table

    @property
    def top_level_names(self) -> set[str]:
        """The first components of ``top``, which may have dotted names."""
        return {top.partition(".")[0] for top in self.top}

    def reads_variable(self, variable: str) -> bool:
        """Whether its import reads a variable; ``NAME_*`` in the table matches by prefix."""
        return any(variable == each or (each[-1] == "*" and variable.startswith(each[:-1])) for each in self.variables)


class PackageTable:
    """The contents of known.json; ``packages``: those that were audited, by name."""

    def __init__(self) -> None:
        with open(TABLE_FILE, "rb") as file:
            content = parse(file.read(), dict[str, dict[str, KnownPackage]])
        self.packages, harmless = (
            {name: replace(each, name=name) for name, each in content[kind].items()}
            for kind in ("packages", "harmless")
        )
        self._by_top = {top: each for each in self.packages.values() for top in each.top}
        self._harmless_by_top = {top: each for each in harmless.values() for top in each.top}

    def find_package(self, module: str) -> KnownPackage | None:
        """Return the audited distribution that a module belongs to, or None."""
        return _find_closest(module, self._by_top)

    def find_harmless(self, module: str) -> KnownPackage | None:
        """Return the distribution of a module whose import only sets the variables in ``sets``; it is not preloaded."""
        return _find_closest(module, self._harmless_by_top)


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

    def why_not_audited(self, package: KnownPackage) -> str | None:
        """Return why the installed package is not one that was audited; None if it is."""
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


def entry_points(info: str) -> frozenset[str]:
    """Return the entry point groups of the distribution whose ``.dist-info`` or ``.egg-info`` folder is ``info``."""
    try:
        with open(os.path.join(info, "entry_points.txt"), encoding="utf-8", errors="replace") as file:
            return frozenset(line.strip(" []\n") for line in file if line.lstrip().startswith("["))
    except OSError:
        return frozenset()


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


def _find_closest(module: str, packages: Mapping[str, KnownPackage]) -> KnownPackage | None:
    """Look up a module, or else the closest parent package that is in ``packages``."""
    while module and module not in packages:
        module = module.rpartition(".")[0]
    return packages.get(module)
