"""The packages that are known: which of their modules one process may import for all ranks, as an audit has found.

The table is data, known.json, made by ``python -m tests.preloads``; nothing is imported to read it. docs/performance.md
says what an audit looks at.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field

if TYPE_CHECKING:
    from typing import Any

TABLE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "known.json")
SITE_DIR_NAMES = frozenset({"site-packages", "dist-packages"})  # names of folders that packages are installed in

_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[\w.]+)?")
_DIST_INFO = re.compile(r"(.+?)-(.+)\.dist-info")


@dataclass(frozen=True)
class KnownPackage:
    """One distribution of the table, with the fields of its JSON.

    Attributes:
        top: its top-level modules.
        versions: those that were audited; later ones of the same major version count as well.
        modules: what may be imported before the fork, with the words of a program's source that lead there. Not every
            version has all of them.
        order: "free" where it gives the same wherever its import stands in a program; "bound" where it does so only
            before all that has an effect.
        minds: what a free one minds all the same, of ``admission.WORDS``.
        variables: those that its import reads, with all that this pulls in.
        sets: those that its import sets.
        loads: the other distributions that its import loads, by name.
        companions: those with which it was found to do something else.
        generators: its random generators, which a fork makes anew (rank/repairs.py).
        settings: what a program may assign to: no import looks at it.
        tries: the modules that its import loads as well, where they are installed.
        seeks: those that its import only looks for.
        refused: why it is imported in each rank, all the same.
    """

    name: str
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

    @property
    def top_level_names(self) -> set[str]:
        """What its top-level modules begin with."""
        return {top.partition(".")[0] for top in self.top}

    def reads_variable(self, variable: str) -> bool:
        """Whether its import reads a variable; one that ends in an asterisk stands for all that begin so."""
        return any(variable == each or (each[-1] == "*" and variable.startswith(each[:-1])) for each in self.variables)


class PackageTable:
    """All of it; ``packages`` by name."""

    def __init__(self) -> None:
        with open(TABLE_FILE, encoding="utf-8") as file:
            found: dict[str, dict[str, dict[str, Any]]] = json.load(file)
        fields = frozenset(KnownPackage.__match_args__)
        self.packages, harmless = (
            {
                name: KnownPackage(name, **{key: each[key] for key in fields & each.keys()})
                for name, each in found[kind].items()
            }
            for kind in ("packages", "harmless")
        )
        self._by_top = {top: each for each in self.packages.values() for top in each.top}
        self._harmless_by_top = {top: each for each in harmless.values() for top in each.top}

    def find_package(self, module: str) -> KnownPackage | None:
        """The distribution that a module belongs to, if it is in the table."""
        return _closest_parent(module, self._by_top)

    def harmless(self, module: str) -> KnownPackage | None:
        """The distribution of a module, if it was found that its import changes nothing but variables that it sets."""
        return _closest_parent(module, self._harmless_by_top)


class InstalledPackages:
    """What is installed for this interpreter, by the names of folders alone."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}  # version and folder, by name
        self._names: dict[str, frozenset[str]] = {}
        for folder in dict.fromkeys(filter(is_site_dir, sys.path)):
            there = list_dir(folder)
            self._names[folder] = frozenset(each.partition(".")[0] for each in there)
            for found in filter(None, map(_DIST_INFO.fullmatch, there)):
                name = normalize_name(found[1])
                twice = name in self._found and self._found[name][1] == folder
                self._found[name] = ("?", folder) if twice else self._found.get(name, (found[2], folder))

    def version(self, name: str) -> str | None:
        """The version of a distribution; None where it is not installed, "?" where that cannot be told."""
        return self._found[name][0] if name in self._found else None

    def holds(self, module: str) -> bool:
        """Whether any distribution has a module, by its file; a folder without ``__init__`` is none."""
        *parents, name = module.split(".")
        for folder in [each for each, names in self._names.items() if (parents or [name])[0] in names]:
            inside = os.path.join(folder, *parents)
            files = [each for each in list_dir(inside) if each.startswith(f"{name}.") and each.endswith((".py", ".so"))]
            if files or os.path.isfile(os.path.join(inside, name, "__init__.py")):
                return True
        return False

    def why_not_audited(self, package: KnownPackage) -> str | None:
        """Say why what is installed is not what was audited."""
        version = self.version(package.name)
        if version is None:
            return "not installed as audited"
        if not counts(version, package.versions):
            return f"{version} has not been audited"
        folder = self._found[package.name][1]
        for stem in package.top_level_names:
            first = next((each for each, names in self._names.items() if stem in names), None)
            if first != folder and (first is not None or stem == next(iter(package.top))):
                return "not installed as audited"
        return None


def list_dir(folder: str) -> list[str]:
    """What is in a folder, in order; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def entry_points(info: str) -> frozenset[str]:
    """The groups of entry points that a distribution has, by its folder of metadata."""
    try:
        with open(os.path.join(info, "entry_points.txt"), encoding="utf-8", errors="replace") as file:
            return frozenset(line.strip(" []\n") for line in file if line.lstrip().startswith("["))
    except OSError:
        return frozenset()


def is_site_dir(folder: str) -> bool:
    """Whether a folder is one that packages are installed in."""
    return os.path.basename(folder) in SITE_DIR_NAMES


def normalize_name(name: str) -> str:
    """The name of a distribution as the table has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def counts(version: str | None, audited: Collection[str]) -> bool:
    """Whether a version is one that was audited, or a later one of the same major version."""
    here = _release_numbers(version or "")
    return version in audited or any(
        here[:1] == each[:1] and here >= each for each in map(_release_numbers, audited) if each
    )


def _release_numbers(version: str) -> list[int]:
    """Those of a release; none of what is before one."""
    found = _VERSION.fullmatch(version)
    return [int(part) for part in found[1].split(".")] if found else []


def _closest_parent(module: str, packages: Mapping[str, KnownPackage]) -> KnownPackage | None:
    """What a module, or the nearest package around it, is listed under."""
    while module and module not in packages:
        module = module.rpartition(".")[0]
    return packages.get(module)
