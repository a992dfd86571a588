"""Which of a program's imports one process may make for all its ranks: those that are known, in their place.

The program is gone through in its order. What its source does not show may change what later imports do: a *barrier*,
from which on nothing more is admitted, torch included. So is an import of a package that is not in the table, if its
sources show that it may do such a thing, and a call of its functions. What stands in a function may run as soon as
anything else does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import lru_cache

from ddplaunch import TYPE_CHECKING
from ddplaunch.preload.facts import Assignment, Barrier, Effect, Import, Logger, Patch, Reach, Use
from ddplaunch.preload.hiding import Hiding
from ddplaunch.preload.program import TORCH, Program
from ddplaunch.preload.sources import Sources
from ddplaunch.preload.table import Installed, Package, Table, holds_installed
from ddplaunch.target import source

if TYPE_CHECKING:
    from ddplaunch.rank import messages


WORDS = {
    "torch's settings": frozenset({"set_default_dtype", "set_default_device", "set_default_tensor_type"}),
    "logging": frozenset({"logging", "basicConfig", "dictConfig"}),
}
"""What an import may mind, and the words without which a program does not change it."""

TORCH_READS = re.compile(
    r"TMPDIR|TEMP|TMP|(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|NVPL|BLIS|VECLIB|ATEN|ONEDNN|DNNL|KINETO|LRU_CACHE|NUMPY|NPY|FX|AOT"
    r"|PYTORCH|TORCH|COMPILE_STROBELIGHT)_?[A-Z0-9_]*"
)
"""Variables that torch, and the libraries that it is linked with, read as they are loaded (traced with torch 2.13).

Some of these are read later, and then no harm is done. The first three are read where dill is installed, which torch
imports.
"""


_FOLDERS = frozenset({"TMPDIR", "TEMP", "TMP"})
"""Variables that name a folder, which the program may have to make before it counts."""


class Admission:
    """What was admitted of one program.

    Attributes:
        modules: what to import after torch, in order; no audited package minds that torch comes first.
        packages: the distributions whose modules these are.
        excluded: what each rank imports itself, and why: "not in the table". A top-level module, or one of a package
            whose others are imported before.
        barrier: what keeps later imports out, in words.
        torch_barrier: what keeps torch itself out, and all others with it.
    """

    def __init__(self, program: Program, table: Table, first: str, variables: Collection[str], *, late: bool) -> None:
        """Go through a program.

        Args:
            first: the folder in front of ``sys.path``.
            variables: the names of those that are set already.
            late: whether what is imported later, in a function, may come first too.
        """
        self._program, self._table, self._first, self._set = program, table, first, variables
        self._installed = Installed()
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._hiding = Hiding([first, *program.folders, *(each for each in paths if not holds_installed(each))])
        self.modules: list[str] = []
        self.packages: dict[str, Package] = {}
        self.excluded: dict[str, str] = {}
        self.barrier: str | None = None
        self._effect: str | None = None  # where the first one is
        self._pending: str | None = None  # a barrier in a function
        self.torch_barrier: str | None = None
        self._torch_seen = False
        self._variables: list[Assignment | Logger] = []
        self._variables_pending: list[Assignment | Logger] = []
        self._settings = tuple(f"{of}." for each in table.packages.values() for of in each.settings)
        self._why_unusable = lru_cache(maxsize=None)(self._find_unusable)
        self._sources = Sources(self._is_known, self._is_read)
        self._walk(late=late)
        if self.torch_barrier:
            self.excluded = {TORCH: f"comes after {self.torch_barrier}", **self.excluded}
            self.excluded.update((min(each.top), "is imported with torch") for each in self.packages.values())
            self.modules, self.packages = [], {}

    @property
    def allowed(self) -> messages.AllowedJson:
        """What a zygote may have after these imports; anything else is a reason not to fork it."""
        packages, torch = self._table.packages, self._table.packages[TORCH]
        loaded = {TORCH, *(name for each in (torch, *self.packages.values()) for name in each.loads)}
        found = [
            each
            for name, each in packages.items()
            if name in loaded or not (each.refused or self._installed.why_not(each))
        ]
        of_torch = {name.replace("-", "_") for name in torch.loads}  # in the table or not
        return {
            "tops": sorted(of_torch.union(*(each.stems for each in found))),
            "sets": sorted({name for each in found for name in each.sets}),
            "generators": sorted({name for each in found for name in each.generators}),
        }

    def _walk(self, *, late: bool) -> None:
        later: list[tuple[Package, Import]] = []
        for step in self._program.steps:
            if isinstance(step, Barrier):
                self._bar(f"{step.where}, which {step.words}", step.reach)
            elif isinstance(step, Patch):
                if not f"{step.target}.".startswith(self._settings) or step.passed:
                    self._bar(f"{step.where}, which {step.words}", step.reach)
            elif isinstance(step, Use):
                if self._pending is None and not self._is_known(step.source.module):
                    self._bar(f"{step.where}, a call of {step.source.top}", step.reach)
            elif isinstance(step, Logger):
                if self._is_to_come(step.top):
                    (self._variables_pending if step.reach <= Reach.LATER else self._variables).append(step)
            elif isinstance(step, Effect):
                if step.reach > Reach.LATER:
                    self._effect = self._effect or step.where
                    self._release()
            elif isinstance(step, Assignment):
                shown = step.early and step.name is not None and step.value is not None
                if step.name in _FOLDERS:  # which libraries pass over where it is not there
                    shown = shown and os.path.isdir(step.value or "")
                if not shown and not (step.default and step.name in self._set):
                    (self._variables_pending if step.reach <= Reach.LATER else self._variables).append(step)
            elif step.top == TORCH:
                self._see_torch(step.reach)
            elif (package := self._known(step)) is None:
                continue
            elif step.reach >= Reach.TRIED:
                if TORCH in package.loads:
                    self._see_torch(step.reach)
                self._admit(package, step)
            elif step.reach is Reach.LATER:
                later.append((package, step))
        self._release()
        self._see_torch(Reach.SURE)
        if late:
            for package, step in later:
                if step.top not in self.excluded:
                    self._admit(package, step)
            for package in filter(self._is_free, list(self.packages.values())):
                if self._why_here(package) is None:
                    for module, leads in package.modules.items():
                        if not self._program.words.isdisjoint(leads):
                            self._add(module, package)

    def _see_torch(self, reach: Reach) -> None:
        """Decide on torch where it is imported first: by the program, or with a package; at the end otherwise."""
        if self._torch_seen or reach < Reach.TRIED:
            return
        self._torch_seen = True
        torch = self._table.packages[TORCH]
        stems = {stem for name in torch.loads if (found := self._table.packages.get(name)) for stem in found.stems}
        hiding = Hiding([self._first, *self._program.folders])  # PYTHONPATH is the zygote's too
        if path := hiding.hides(stems, set(), plugins=False):
            self.torch_barrier = f"{os.path.relpath(path)}, which may have modules that torch imports"
        for each in self._variables:
            if isinstance(each, Logger):
                if each.top in ("", TORCH, *stems):
                    self.barrier = self.barrier or f"{each.where}, which {each.words}"
            elif each.name is None or TORCH_READS.fullmatch(each.name):
                what = each.name or "variables"
                self.barrier = self.barrier or f"{each.where}, which sets {what} to what its source does not show"
        self.torch_barrier = self.torch_barrier or self.barrier

    def _bar(self, why: str, reach: Reach) -> None:
        if reach <= Reach.LATER:
            self._pending = self._pending or why
        else:
            self.barrier = self.barrier or why

    def _release(self) -> None:
        """From here on what stands in functions may have run."""
        self.barrier = self.barrier or self._pending
        self._variables += self._variables_pending
        self._variables_pending.clear()

    def _known(self, step: Import) -> Package | None:
        """The package that a statement imports, if it is known; another may change what comes after it."""
        package = self._table.owner(step.module)
        there = package is not None and self._installed.version(package.name) is not None
        if not there and source.find_module(step.top, self._first) is None:
            return None  # there is nothing to import
        why = "not in the table" if package is None else self._why_unusable(package.name)
        if why is None:
            return package
        self.excluded.setdefault(step.top, why)
        if self.barrier is None and not self._table.is_harmless(step.module, self._installed):
            if how := self._sources.find_interference(step.module, step.names):
                self._bar(f"{step.where}, an import of {step.top}, where {how}", step.reach)
            elif step.reach > Reach.LATER:
                self._effect = self._effect or step.where
        pending = self._variables_pending if step.reach <= Reach.LATER else self._variables
        pending += (Assignment(step.where, step.reach, each, None) for each in self._table.set_by_harmless(step.module))
        return None

    def _is_known(self, module: str) -> bool:
        """Whether importing a module, and calling what is in it, leaves other imports alone."""
        package = self._table.owner(module)
        known = package is not None and self._why_unusable(package.name) is None
        return known or module.partition(".")[0] == TORCH or self._table.is_harmless(module, self._installed)

    def _is_read(self, variable: str) -> bool:
        """Whether any import that is known reads a variable."""
        known = self._table.packages.values()
        return bool(TORCH_READS.fullmatch(variable)) or any(each.reads(variable) for each in known)

    def _is_to_come(self, top: str) -> bool:
        """Whether a logger may be that of a package that is known, and not imported yet."""
        if top in ("", TORCH):
            return not (top and self._torch_seen)
        owner = self._table.owner(top)
        return owner is not None and owner.name not in self.packages

    def _find_unusable(self, name: str) -> str | None:
        """Why a package may not be imported before the fork in this installation, by any program."""
        package = self._table.packages[name]
        if why := package.refused or self._installed.why_not(package):
            return why
        for other in package.companions:
            if self._installed.version(other) is not None:
                return f"{other} is installed"
        for other in package.loads:
            if other in (TORCH, name) or self._installed.version(other) is None:
                continue
            loaded = self._table.packages.get(other)
            why = "is not in the table" if loaded is None else self._installed.why_not(loaded)
            if why:
                return f"imports {other}, which {why}"
        for module in filter(self._installed.holds, package.tries):
            tried = self._table.owner(module)
            why = "is not in the table" if tried is None else tried.refused or self._installed.why_not(tried)
            if why:
                return f"imports {module.partition('.')[0]}, which {why}"
        return None

    def _is_free(self, package: Package) -> bool:
        """Whether what a package's import gives is the same wherever it stands in this program."""
        return package.order == "free" and not any(WORDS[each] & self._program.words for each in package.minds)

    def _why_here(self, package: Package) -> str | None:
        """Why a package is not imported before the fork for this program, at this place."""
        if why := self._why_unusable(package.name):
            return why
        tried = [owner for module in package.tries if (owner := self._table.owner(module))]
        names = {package.name, *package.loads}
        names.update(name for each in tried for name in (each.name, *each.loads))
        known = [self._table.packages[name] for name in names & self._table.packages.keys()]
        wanted = {module.partition(".")[0] for module in (*package.tries, *package.seeks)}
        stems = wanted.union(*(each.stems for each in known))
        if path := self._hiding.hides(stems, names):
            return f"{os.path.relpath(path)} comes first"
        if self.barrier:
            return f"comes after {self.barrier}"
        if self._effect and not self._is_free(package):
            return f"comes after {self._effect}, which may matter"
        if named := self._program.words.intersection(package.sets):
            return f"sets {min(named)}"
        for each in self._variables:
            if isinstance(each, Logger):
                if not each.top or (each.top in stems and each.top != TORCH):
                    return f"{each.where} {each.words}"
            elif any(one.reads(each.name) if each.name else one.variables for one in (package, *tried)):
                return f"{each.where} sets {each.name or 'variables that it reads'}"
        return None

    def _admit(self, package: Package, step: Import) -> None:
        """Take in what a statement imports, if that may come first."""
        if why := self._why_here(package):
            self.excluded.setdefault(step.module if package.name in self.packages else step.top, why)
            return
        named = {f"{step.module}.{name}" for name in step.names}
        for module, leads in package.modules.items():
            parent = step.module == module or step.module.startswith(module + ".")
            if parent or module in named or not set(leads).isdisjoint(step.names):
                self._add(module, package)

    def _add(self, module: str, package: Package) -> None:
        owner = self._table.owner(module)
        if owner is None or (owner.name not in (package.name, TORCH) and self._why_here(owner)):
            return
        if not self._installed.has(owner.name, module):  # this version does not have it
            return
        self.packages[package.name] = package
        if module not in self.modules:
            self.modules.append(module)
