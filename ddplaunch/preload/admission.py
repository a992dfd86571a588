"""Which of a program's imports one process may make for all its ranks: those that are known, in their place.

The program is gone through in its order. What its source does not show may change what later imports do: a *barrier*,
from which on nothing more is admitted, torch included. So is an import of a package that is not in the table, if its
sources show that it may do such a thing, and a call of its functions. What stands in a function may run as soon as
anything else does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from ddplaunch import TYPE_CHECKING
from ddplaunch.preload.facts import (
    CALLS,
    CHANGES,
    CONFIGURES,
    Assignment,
    Barrier,
    Certainty,
    Import,
    SideEffect,
    Step,
    Use,
)
from ddplaunch.preload.hiding import ShadowedPackages
from ddplaunch.preload.program import TORCH, ProgramSource
from ddplaunch.preload.sources import Sources
from ddplaunch.preload.table import InstalledPackages, KnownPackage, PackageTable, counts, is_site_dir
from ddplaunch.target import source

if TYPE_CHECKING:
    from ddplaunch.rank import messages


GLOBAL_SETTINGS_WORDS = {
    "torch's settings": frozenset({"set_default_dtype", "set_default_device", "set_default_tensor_type"}),
    "logging": frozenset({"logging", "basicConfig", "dictConfig"}),
}
"""What an import may mind, and the words without which a program does not change it."""

TORCH_READS = re.compile(
    r"TMPDIR|TEMP|TMP|(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|NVPL|BLIS|VECLIB|ATEN|ONEDNN|DNNL|KINETO|LRU_CACHE|NUMPY|NPY|FX|AOT"
    r"|PYTORCH|TORCH|COMPILE_STROBELIGHT)_?[A-Z0-9_]*"
)
"""Variables that torch, and the libraries that it is linked with, read as they are loaded (traced with torch 2.13)."""

_FOLDERS = frozenset({"TMPDIR", "TEMP", "TMP"})
"""Variables that name a folder, which the program may have to make before it counts; torch reads them with dill."""


class ImportSelector:
    """What was admitted of one program.

    Attributes:
        modules: what to import after torch, in order; no audited package minds that torch comes first.
        packages: the distributions whose modules these are.
        excluded: what each rank imports itself, and why: "not in the table". A top-level module, or one of a package
            whose others are imported before.
        barrier: what keeps later imports out, in words.
        torch_barrier: what keeps torch itself out, and all others with it.
    """

    def __init__(
        self,
        program: ProgramSource,
        table: PackageTable,
        sys_path_0: str,
        variables: Collection[str],
        *,
        include_deferred: bool,
    ) -> None:
        """Go through a program; ``sys_path_0`` and ``variables``: in front of ``sys.path``, and set, before it starts.

        ``include_deferred``: whether what is imported later, in a function, may come first too.
        """
        self._program, self._table, self._first, self._set = program, table, sys_path_0, variables
        self._installed = InstalledPackages()
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._hiding = ShadowedPackages(
            [sys_path_0, *program.folders, *(each for each in paths if not is_site_dir(each))]
        )
        self.modules: list[str] = []
        self.packages: dict[str, KnownPackage] = {}
        self.excluded: dict[str, str] = {}
        self.barrier: str | None = None
        self._effect: str | None = None  # where the first one is
        self.torch_barrier: str | None = None
        self._torch_seen = False
        self._unshown: list[Assignment | Use] = []  # variables and loggers
        self._in_functions: list[Step] = []
        self._later: list[tuple[KnownPackage, Import]] = []
        self._settings = tuple(f"{of}." for each in table.packages.values() for of in each.settings)
        self._why_unusable = lru_cache(maxsize=None)(self._find_unusable)
        self._sources = Sources(self._is_known, self._is_read)
        self._walk_steps(late=include_deferred)
        if self.torch_barrier:
            self.excluded = {TORCH: f"comes after {self.torch_barrier}", **self.excluded}
            self.excluded.update((min(each.top), "is imported with torch") for each in self.packages.values())
            self.modules, self.packages = [], {}

    @property
    def allowed_state(self) -> messages.AllowedState:
        """What a zygote may have after these imports; anything else is a reason not to fork it."""
        torch = self._table.packages[TORCH]
        loaded = {TORCH, *(name for each in (torch, *self.packages.values()) for name in each.loads)}
        known = self._table.packages.values()
        found = [
            each for each in known if each.name in loaded or not (each.refused or self._installed.why_not_audited(each))
        ]
        of_torch = {name.replace("-", "_") for name in torch.loads}  # in the table or not
        return {
            "tops": sorted(of_torch.union(*(each.top_level_names for each in found))),
            "sets": sorted({name for each in found for name in each.sets}),
            "generators": sorted({name for each in found for name in each.generators}),
        }

    def _walk_steps(self, *, late: bool) -> None:
        for step in self._program.steps:
            if step.certainty > Certainty.DEFERRED:
                self._take(step)
            elif not isinstance(step, SideEffect):
                self._in_functions.append(step)
        self._apply_pending()
        self._see_torch()
        if late:
            for package, imported in self._later:
                if imported.top_level_name not in self.excluded:
                    self._select(package, imported)
            for package in filter(self._is_order_independent, list(self.packages.values())):
                if self._why_excluded(package) is None:
                    for module, leads in package.modules.items():
                        if not self._program.words.isdisjoint(leads):
                            self._add(module, package)

    def _apply_pending(self) -> None:
        """From here on what stands in functions may have run."""
        steps, self._in_functions = self._in_functions, []
        for step in steps:
            self._take(step)

    def _take(self, step: Step) -> None:
        """Note what a step does to the imports after it."""
        if isinstance(step, SideEffect):
            self._effect = self._effect or step.where
            self._apply_pending()
        elif isinstance(step, Barrier):
            self._add_barrier(step)
        elif isinstance(step, Use):
            if step.verb == CONFIGURES:
                owner = self._table.find_package(step.source.top_level_name)
                seen = (
                    self._torch_seen
                    if step.source.top_level_name == TORCH
                    else owner is None or owner.name in self.packages
                )
                self._unshown += [] if seen else [step]
            elif step.verb == CHANGES and f"{step.target}.".startswith(self._settings):
                pass
            elif step.verb != CALLS or not self._is_known(step.source.module):
                self._add_barrier(step)
        elif isinstance(step, Assignment):
            shown = step.before_imports and step.name is not None and step.value is not None
            if step.name in _FOLDERS:  # which libraries pass over where it is not there
                shown = shown and os.path.isdir(step.value or "")
            if not shown and not (step.default and step.name in self._set):
                self._unshown.append(step)
        elif step.top_level_name == TORCH:
            if step.certainty >= Certainty.IN_BLOCK:
                self._see_torch()
        elif package := self._find_package(step):
            if step.certainty >= Certainty.IN_BLOCK:
                if TORCH in package.loads:
                    self._see_torch()
                self._select(package, step)
            elif step.certainty is Certainty.DEFERRED:
                self._later.append((package, step))

    def _add_barrier(self, step: Barrier | Use) -> None:
        self.barrier = self.barrier or f"{step.where}, which {step.reason}"

    def _see_torch(self) -> None:
        """Decide on torch where it is imported first: by the program, or with a package; at the end otherwise."""
        if self._torch_seen:
            return
        self._torch_seen = True
        torch = self._table.packages[TORCH]
        stems = {
            stem for name in torch.loads if (found := self._table.packages.get(name)) for stem in found.top_level_names
        }
        hiding = ShadowedPackages([self._first, *self._program.folders])  # PYTHONPATH is the zygote's too
        if path := hiding.find_shadow(stems, set(), plugins=False):
            self.torch_barrier = f"{os.path.relpath(path)}, which may have modules that torch imports"
        if each := self._find_unshown({TORCH, *stems}, lambda name: not name or TORCH_READS.fullmatch(name)):
            unshown = " to what its source does not show" if isinstance(each, Assignment) else ""
            self.barrier = self.barrier or f"{each.where}, which {each.reason}{unshown}"
        self.torch_barrier = self.torch_barrier or self.barrier

    def _find_unshown(self, stems: set[str], reads: Callable[[str | None], object]) -> Assignment | Use | None:
        """The first step before this that sets a variable which an import reads, or configures one of its loggers."""
        found = (
            each.source.top_level_name in stems if isinstance(each, Use) else reads(each.name) for each in self._unshown
        )
        return next((each for each, matters in zip(self._unshown, found, strict=True) if matters), None)

    def _find_package(self, step: Import) -> KnownPackage | None:
        """The package that a statement imports, if it is known; another may change what comes after it."""
        package = self._table.find_package(step.module)
        there = package is not None and self._installed.version(package.name) is not None
        if not there and source.find_module(step.top_level_name, self._first) is None:
            return None  # there is nothing to import
        why = "not in the table" if package is None else self._why_unusable(package.name)
        if why is None:
            return package
        self.excluded.setdefault(step.top_level_name, why)
        if self.barrier is None and not self._is_harmless(step.module):
            if how := self._sources.find_interference(step.module, step.names):
                self.barrier = f"{step.where}, an import of {step.top_level_name}, where {how}"
            elif step.certainty > Certainty.DEFERRED:
                self._effect = self._effect or step.where
        sets = getattr(self._table.harmless(step.module), "sets", ())
        self._unshown += (Assignment(step.where, step.certainty, each) for each in sets)
        return None

    def _is_known(self, module: str) -> bool:
        """Whether importing a module, and calling what is in it, leaves other imports alone."""
        package = self._table.find_package(module)
        known = package is not None and self._why_unusable(package.name) is None
        return known or module.partition(".")[0] == TORCH or self._is_harmless(module)

    def _is_harmless(self, module: str) -> bool:
        found = self._table.harmless(module)
        return found is not None and counts(self._installed.version(found.name), found.versions)

    def _is_read(self, variable: str) -> bool:
        """Whether any import that is known reads a variable."""
        known = self._table.packages.values()
        return bool(TORCH_READS.fullmatch(variable)) or any(each.reads_variable(variable) for each in known)

    def _find_unusable(self, name: str) -> str | None:
        """Why a package may not be imported before the fork in this installation, by any program."""
        package = self._table.packages[name]
        if why := package.refused or self._installed.why_not_audited(package):
            return why
        for other in package.companions:
            if self._installed.version(other) is not None:
                return f"{other} is installed"
        parts = [(each, self._table.packages.get(each), False) for each in package.loads if each not in (TORCH, name)]
        parts = [each for each in parts if self._installed.version(each[0]) is not None]
        tried = filter(self._installed.holds, package.tries)
        parts += ((each.partition(".")[0], self._table.find_package(each), True) for each in tried)
        for other, part, by_itself in parts:
            why = (
                "is not in the table"
                if part is None
                else (by_itself and part.refused) or self._installed.why_not_audited(part)
            )
            if why:
                return f"imports {other}, which {why}"
        return None

    def _is_order_independent(self, package: KnownPackage) -> bool:
        """Whether what a package's import gives is the same wherever it stands in this program."""
        return package.order == "free" and not any(
            GLOBAL_SETTINGS_WORDS[each] & self._program.words for each in package.minds
        )

    def _why_excluded(self, package: KnownPackage) -> str | None:
        """Why a package is not imported before the fork for this program, at this place."""
        if why := self._why_unusable(package.name):
            return why
        involved = [package, *(owner for module in package.tries if (owner := self._table.find_package(module)))]
        names = {name for each in involved for name in (each.name, *each.loads)}
        known = [self._table.packages[name] for name in names & self._table.packages.keys()]
        wanted = {module.partition(".")[0] for module in (*package.tries, *package.seeks)}
        stems = wanted.union(*(each.top_level_names for each in known))
        if path := self._hiding.find_shadow(stems, names):
            return f"{os.path.relpath(path)} comes first"
        if self.barrier:
            return f"comes after {self.barrier}"
        if self._effect and not self._is_order_independent(package):
            return f"comes after {self._effect}, which may matter"
        if named := self._program.words.intersection(package.sets):
            return f"sets {min(named)}"
        each = self._find_unshown(
            stems - {TORCH}, lambda name: any(one.reads_variable(name) if name else one.variables for one in involved)
        )
        return f"{each.where} {each.reason}" if each else None

    def _select(self, package: KnownPackage, step: Import) -> None:
        """Take in what a statement imports, if that may come first."""
        if why := self._why_excluded(package):
            self.excluded.setdefault(step.module if package.name in self.packages else step.top_level_name, why)
            return
        named = {f"{step.module}.{name}" for name in step.names}
        for module, leads in package.modules.items():
            parent = step.module == module or step.module.startswith(module + ".")
            if parent or module in named or not set(leads).isdisjoint(step.names):
                self._add(module, package)

    def _add(self, module: str, package: KnownPackage) -> None:
        owner = self._table.find_package(module)
        if owner is None or (owner.name not in (package.name, TORCH) and self._why_excluded(owner)):
            return
        if not self._installed.holds(module):  # this version does not have it
            return
        self.packages[package.name] = package
        if module not in self.modules:
            self.modules.append(module)
