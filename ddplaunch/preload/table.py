"""The packages that are known: which of their modules one process may import for all ranks, as an audit has found.

The table is data, known.json, made by ``python -m tests.preloads``; nothing is imported to read it. docs/performance.md
says what an audit looks at.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from typing import Any

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "known.json")

_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[\w.]+)?")
_DIST_INFO = re.compile(r"(.+?)-(.+)\.dist-info")


@dataclass(frozen=True)
class Package:
    """One distribution of the table.

    Attributes:
        tops: its top-level modules.
        versions: those that were audited; later ones of the same major version count as well.
        modules: what may be imported before the fork, with the words of a program's source that lead there. Not every
            version has all of them.
        free: wherever its import stands in a program, it gives the same; otherwise only before all that has an effect.
        minds: what it minds all the same, of ``admission.WORDS``.
        variables: those that its import reads, with all that this pulls in.
        sets: those that its import sets.
        loads: the other distributions that its import loads, by name.
        companions: those with which it was found to do something else.
        generators: its random generators, which a fork makes anew (rank/repairs.py).
        settings: what a program may assign to: no import looks at it.
        refused: why it is imported in each rank, all the same.
    """

    name: str
    tops: tuple[str, ...]
    versions: tuple[str, ...]
    modules: Mapping[str, frozenset[str]]
    free: bool
    minds: tuple[str, ...]
    variables: frozenset[str]
    sets: frozenset[str]
    loads: tuple[str, ...]
    companions: tuple[str, ...]
    generators: tuple[str, ...]
    refused: str | None

    def reads(self, variable: str) -> bool:
        """Whether its import reads a variable; one that ends in an asterisk stands for all that begin so."""
        return any(variable == each or (each[-1] == "*" and variable.startswith(each[:-1])) for each in self.variables)


class Table:
    """All of it; an entry is read when it is asked for."""

    def __init__(self) -> None:
        with open(FILE, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
        self._packages: dict[str, dict[str, Any]] = found["packages"]
        self._harmless: dict[str, dict[str, Any]] = found["harmless"]
        self._by_top = {top: name for name, entry in self._packages.items() for top in entry["top"]}
        self._harmless_tops = {top: name for name, entry in self._harmless.items() for top in entry["top"]}
        self.settings = tuple(each for entry in self._packages.values() for each in entry.get("settings", ()))

    def package(self, name: str) -> Package | None:
        """The distribution of this name, if it is in the table."""
        entry = self._packages.get(name)
        if entry is None:
            return None
        return Package(
            name=name,
            tops=tuple(entry["top"]),
            versions=tuple(entry["versions"]),
            modules={module: frozenset(words) for module, words in entry.get("modules", {}).items()},
            free=entry.get("order") == "free",
            minds=tuple(entry.get("minds", ())),
            variables=frozenset(entry.get("variables", ())),
            sets=frozenset(entry.get("sets", ())),
            loads=tuple(entry.get("loads", ())),
            companions=tuple(entry.get("companions", ())),
            generators=tuple(entry.get("generators", ())),
            refused=entry.get("refused"),
        )

    def usable(self, installed: Installed) -> list[Package]:
        """All that may be imported before the fork, as it is installed."""
        found = [each for each in map(self.package, self._packages) if each is not None and not each.refused]
        return [each for each in found if installed.why_not(each) is None]

    def owner(self, module: str) -> Package | None:
        """The distribution that a module belongs to, if it is in the table."""
        return self.package(_longest(module, self._by_top) or "")

    def is_harmless(self, module: str, installed: Installed) -> bool:
        """Whether it was found that importing a module changes nothing in others."""
        name = _longest(module, self._harmless_tops)
        return name is not None and _counts(installed.version(name), self._harmless[name]["versions"])


class Installed:
    """What is installed for this interpreter, by the names of folders alone."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, str]]] = {}  # version and folder, by name
        self._names: dict[str, frozenset[str]] = {}
        for folder in filter(holds_installed, sys.path):
            if folder not in self._names:
                self._look(folder)

    def _look(self, folder: str) -> None:
        try:
            entries = os.listdir(folder)
        except OSError:
            entries = []
        self._names[folder] = frozenset(each.partition(".")[0] for each in entries)
        for each in entries:
            if found := _DIST_INFO.fullmatch(each):
                name = re.sub(r"[-_.]+", "-", found[1]).lower()
                self._found.setdefault(name, []).append((found[2], folder))

    def version(self, name: str) -> str | None:
        """The version of a distribution; None where it is not installed, "?" where that cannot be told."""
        found = self._found.get(name, ())
        if len({folder for _, folder in found}) < len(found):  # two in one folder
            return "?"
        return found[0][0] if found else None

    def has(self, name: str, module: str) -> bool:
        """Whether the installed version of a distribution has a module, by its file."""
        folder, stem = os.path.split(os.path.join(self._found[name][0][1], *module.split(".")))
        try:
            return any(each.partition(".")[0] == stem for each in os.listdir(folder))
        except OSError:
            return False

    def why_not(self, package: Package) -> str | None:
        """Say why what is installed is not what was audited; it is installed."""
        version = self.version(package.name)
        if version is None:
            return "not installed as audited"
        if not _counts(version, package.versions):
            return f"{version} has not been audited"
        folder = self._found[package.name][0][1]
        for top in {top.partition(".")[0] for top in package.tops}:
            first = next((each for each, names in self._names.items() if top in names), None)
            if first != folder and (first is not None or top == package.tops[0]):
                return "not installed as audited"
        return None


def holds_installed(folder: str) -> bool:
    """Whether a folder is one that packages are installed in, by its name (Debian has another one)."""
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def _counts(version: str | None, audited: Iterable[str]) -> bool:
    """Whether a version is one that was audited, or a later one of the same major version."""
    if version is None:
        return False
    found = _VERSION.fullmatch(version)
    for each in audited:
        if version == each:
            return True
        known = _VERSION.fullmatch(each)
        if found and known:
            here, there = ([int(part) for part in match[1].split(".")] for match in (found, known))
            if here[0] == there[0] and here >= there:
                return True
    return False


def _longest(module: str, names: Mapping[str, str]) -> str | None:
    """What a module, or the nearest package around it, is listed under."""
    while module:
        if module in names:
            return names[module]
        module = module.rpartition(".")[0]
    return None
