"""Selects which of a program's imports are preloaded: done once in the zygote, the process that forks all ranks.

Each rank's modules must end up as if it had run all imports itself. ``ImportSelector`` goes through the statements of
the program (``program.read_program``: its own files, in the order in which they run) and applies these rules:

* Only torch and the packages of the table known.json are preloaded, in a version that was audited: its import was
  checked to be safe before a fork. Others are ``excluded``.
* A *barrier* is a statement that may change what later imports do in a way that its source does not show:
  ``exec(text)``, a new entry in ``sys.meta_path``, an assignment to an attribute of another module. No import after it
  is preloaded, torch included. Importing a package that is neither usable nor on the table's list of harmless ones is
  a barrier if its sources may do such a thing; calling one of its functions always is.
* A *side effect* is any other statement that may run code of the program, and the import of an unknown package. After
  it only packages are preloaded whose import has the same result at any position (``order: "free"`` in the table).
  A side effect may call any function of the program, so from there on the statements inside functions count too; if
  there is none, they count after the last statement.
* An environment variable that is set to an unknown value, or a logger that the program may have configured, excludes
  the later imports that read this variable or use this logger. (A constant that is assigned before the imports is
  known: the zygote sets it too, see ``ZygotePlan.settings``.)
* A package is excluded if its import sets an environment variable that the program mentions, or if a file of the user
  shadows a module that the import loads.
* With ``include_deferred``, packages that only functions import are preloaded last, by the same rules, and so are
  further modules of selected order-free packages that the program mentions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from ddplaunch.core.rank import zygote_messages
from ddplaunch.features.preload.known_packages import (
    InstalledPackages,
    KnownPackage,
    PackageTable,
    is_audited_version,
    is_site_dir,
)
from ddplaunch.features.preload.program_source import TORCH, ProgramSource
from ddplaunch.features.preload.shadowing import ShadowedPackages
from ddplaunch.features.preload.sources import Sources
from ddplaunch.features.preload.statements import (
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
from ddplaunch.system.target import source

GLOBAL_SETTINGS_WORDS = {
    "torch's settings": frozenset({"set_default_dtype", "set_default_device", "set_default_tensor_type"}),
    "logging": frozenset({"logging", "basicConfig", "dictConfig"}),
}
"""Global settings that an import may depend on (``minds`` in the table), and the words that a program sets them by."""

TORCH_READS = re.compile(
    r"TMPDIR|TEMP|TMP|(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|NVPL|BLIS|VECLIB|ATEN|ONEDNN|DNNL|KINETO|LRU_CACHE|NUMPY|NPY|FX|AOT"
    r"|PYTORCH|TORCH|COMPILE_STROBELIGHT)_?[A-Z0-9_]*"
)
"""Variables that torch, and the libraries that it is linked with, read as they are loaded (traced with torch 2.13)."""

_LIBRARY_SCANNERS = frozenset({"threadpoolctl"})
"""Modules whose functions change all native libraries that are loaded: a barrier, since plain Python has fewer then."""

_FOLDER_VARIABLES = frozenset({"TMPDIR", "TEMP", "TMP"})
"""Variables that count as known only if their folder exists: libraries ignore a missing folder, which the program may
create later. The import of torch reads them only where dill is installed."""


class ImportSelector:
    """The imports of one program that may be preloaded; selected as it is created.

    Attributes:
        modules: what to import after torch, in order; no audited package depends on being imported before torch.
        packages: the distributions of ``modules``, by name.
        excluded: the modules that each rank imports itself, with the reason, like "not in the table": a top-level
            module, or a submodule if others of its package are preloaded.
        barrier: the first barrier, as "train.py:3, which calls exec"; None without one.
        torch_barrier: why torch cannot be preloaded, and so nothing can; None if it can.
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
        """Select the imports of ``program``.

        Args:
            program: its statements, and the words in its files.
            table: the known packages.
            sys_path_0: ``sys.path[0]`` of the ranks, the folder of the program.
            variables: the names of variables that are set before the program starts.
            include_deferred: also preload what is imported only inside functions.
        """
        self._program, self._table, self._sys_path_0, self._variables = program, table, sys_path_0, variables
        self._installed = InstalledPackages()
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._shadowed = ShadowedPackages(
            [sys_path_0, *program.folders, *(each for each in paths if not is_site_dir(each))]
        )
        self.modules: list[str] = []
        self.packages: dict[str, KnownPackage] = {}
        self.excluded: dict[str, str] = {}
        self.barrier: str | None = None
        self.torch_barrier: str | None = None
        self._side_effect: str | None = None  # where the first one is
        self._is_torch_decided = False
        self._unknown_settings: list[Assignment | Use] = []  # variables without a known value, and configured loggers
        self._pending: list[Step] = []  # steps inside functions, until a side effect may call these
        self._deferred_imports: list[tuple[KnownPackage, Import]] = []  # usable packages that only functions import
        # Attributes of known packages that a program may assign to: no import reads them, so it is not a barrier.
        self._ignored_targets = tuple(f"{target}." for each in table.packages.values() for target in each.settings)
        self._why_unusable = lru_cache(maxsize=None)(self._check_usable)
        self._sources = Sources(self._is_known, self._is_variable_read)
        self._process_steps(include_deferred=include_deferred)
        if self.torch_barrier:
            self.excluded = {TORCH: f"comes after {self.torch_barrier}", **self.excluded}
            self.excluded.update((min(each.top), "is imported with torch") for each in self.packages.values())
            self.modules, self.packages = [], {}

    @property
    def allowed_state(self) -> zygote_messages.AllowedState:
        """What the preloaded imports may leave in the zygote; if it finds anything else, it imports torch only."""
        torch = self._table.packages[TORCH]
        loaded = {TORCH, *(name for each in (torch, *self.packages.values()) for name in each.loads)}
        known = self._table.packages.values()
        allowed = [
            each for each in known if each.name in loaded or not (each.refused or self._installed.why_not_audited(each))
        ]
        of_torch = {name.replace("-", "_") for name in torch.loads}  # in the table or not
        return {
            "top_modules": sorted(of_torch.union(*(each.top_level_names for each in allowed))),
            "changed_variables": sorted({name for each in allowed for name in each.sets}),
            "generators": sorted({name for each in allowed for name in each.generators}),
        }

    def _process_steps(self, *, include_deferred: bool) -> None:
        """Go through the program: first the statements outside functions, then those inside, then deferred imports."""
        for step in self._program.steps:
            if step.certainty > Certainty.DEFERRED:
                self._process(step)
            elif not isinstance(step, SideEffect):
                self._pending.append(step)
        self._process_pending()
        self._decide_torch()
        if include_deferred:
            for package, imported in self._deferred_imports:
                if imported.top_level_name not in self.excluded:
                    self._select(package, imported)
            for package in filter(self._is_order_independent, list(self.packages.values())):
                if self._why_excluded(package) is None:
                    for module, words in package.modules.items():
                        if not self._program.words.isdisjoint(words):
                            self._add(module, package)

    def _process_pending(self) -> None:
        """Process the steps inside functions: from here on they may have run."""
        steps, self._pending = self._pending, []
        for step in steps:
            self._process(step)

    def _process(self, step: Step) -> None:
        """Select what a step imports, or note how it affects the imports after it.

        An import with a certainty below IN_BLOCK may not run: it is not selected here, but may affect others.
        """
        if isinstance(step, SideEffect):
            self._side_effect = self._side_effect or step.where
            self._process_pending()
        elif isinstance(step, Barrier):
            self._add_barrier(step)
        elif isinstance(step, Use):
            if step.verb == CONFIGURES:
                self._process_logger(step)
            elif step.verb == CHANGES and f"{step.target}.".startswith(self._ignored_targets):
                pass
            elif step.verb != CALLS or not self._is_known(step.source.module):
                self._add_barrier(step)
        elif isinstance(step, Assignment):
            is_value_known = step.before_imports and step.name is not None and step.value is not None
            if step.name in _FOLDER_VARIABLES:
                is_value_known = is_value_known and os.path.isdir(step.value or "")
            if not is_value_known and not (step.default and step.name in self._variables):
                self._unknown_settings.append(step)
        elif step.top_level_name in _LIBRARY_SCANNERS:
            self.barrier = (
                self.barrier or f"{step.where}, an import of {step.top_level_name}, which changes all libraries"
            )
            self.excluded.setdefault(step.top_level_name, f"comes after {self.barrier}")
        elif step.top_level_name == TORCH:
            if step.certainty >= Certainty.IN_BLOCK:
                self._decide_torch()
        elif package := self._resolve_package(step):
            if step.certainty >= Certainty.IN_BLOCK:
                if TORCH in package.loads:
                    self._decide_torch()
                self._select(package, step)
            elif step.certainty is Certainty.DEFERRED:
                self._deferred_imports.append((package, step))

    def _process_logger(self, step: Use) -> None:
        """Note that a logger may be configured, unless its package was imported before, or is never preloaded."""
        top = step.source.top_level_name
        owner = self._table.find_package(top)
        is_late = self._is_torch_decided if top == TORCH else owner is None or owner.name in self.packages
        if not is_late:
            self._unknown_settings.append(step)

    def _add_barrier(self, step: Barrier | Use) -> None:
        """Note a barrier; only the first one counts."""
        self.barrier = self.barrier or f"{step.where}, which {step.reason}"

    def _decide_torch(self) -> None:
        """Decide whether torch may be preloaded: at its first import, also by a package, or at the program's end."""
        if self._is_torch_decided:
            return
        self._is_torch_decided = True
        torch = self._table.packages[TORCH]
        tops = {top for name in torch.loads if (part := self._table.packages.get(name)) for top in part.top_level_names}
        # PYTHONPATH may shadow them as well, but the zygote has the same one.
        shadowed = ShadowedPackages([self._sys_path_0, *self._program.folders])
        if path := shadowed.find_shadow(tops, set(), plugins=False):
            self.torch_barrier = f"{os.path.relpath(path)}, which may have modules that torch imports"
        if step := self._find_setting({TORCH, *tops}, lambda name: not name or TORCH_READS.fullmatch(name)):
            suffix = " to a value that its source does not show" if isinstance(step, Assignment) else ""
            self.barrier = self.barrier or f"{step.where}, which {step.reason}{suffix}"
        self.torch_barrier = self.torch_barrier or self.barrier

    def _find_setting(self, tops: set[str], reads: Callable[[str | None], object]) -> Assignment | Use | None:
        """Find the first unknown setting that an import depends on.

        Args:
            tops: the top-level modules that it loads; their loggers matter to it.
            reads: whether it reads a variable of this name; None is any variable.
        """
        for step in self._unknown_settings:
            if step.source.top_level_name in tops if isinstance(step, Use) else reads(step.name):
                return step
        return None

    def _resolve_package(self, step: Import) -> KnownPackage | None:
        """Return the known and usable package that a statement imports, or None.

        The import of any other package is noted as excluded and, unless it is known to be harmless, as a barrier or a
        side effect.
        """
        package = self._table.find_package(step.module)
        is_installed = package is not None and self._installed.version(package.name) is not None
        if not is_installed and source.find_module(step.top_level_name, self._sys_path_0) is None:
            return None  # there is nothing to import
        why = "not in the table" if package is None else self._why_unusable(package.name)
        if why is None:
            return package
        self.excluded.setdefault(step.top_level_name, why)
        if self.barrier is None and not self._is_harmless(step.module):
            if how := self._sources.find_interference(step.module, step.names):
                self.barrier = f"{step.where}, an import of {step.top_level_name}, where {how}"
            elif step.certainty > Certainty.DEFERRED:
                self._side_effect = self._side_effect or step.where
        sets = getattr(self._table.find_harmless(step.module), "sets", ())
        self._unknown_settings += (Assignment(step.where, step.certainty, each) for each in sets)
        return None

    def _is_known(self, module: str) -> bool:
        """Whether importing a module, and calling its functions, is known not to affect other imports."""
        package = self._table.find_package(module)
        is_usable = package is not None and self._why_unusable(package.name) is None
        return is_usable or module.partition(".")[0] == TORCH or self._is_harmless(module)

    def _is_harmless(self, module: str) -> bool:
        package = self._table.find_harmless(module)
        return package is not None and is_audited_version(self._installed.version(package.name), package.versions)

    def _is_variable_read(self, variable: str) -> bool:
        """Whether importing torch, or any package of the table, reads a variable."""
        known = self._table.packages.values()
        return bool(TORCH_READS.fullmatch(variable)) or any(each.reads_variable(variable) for each in known)

    def _check_usable(self, name: str) -> str | None:
        """Return why a package of the table cannot be preloaded in this installation, for any program; or None.

        Checked are its own version and those of the packages that its import loads (``loads``), or loads if they are
        installed (``tries``). ``companions`` are packages that change what its import does.
        """
        package = self._table.packages[name]
        if why := package.refused or self._installed.why_not_audited(package):
            return why
        for other in package.companions:
            if self._installed.version(other) is not None:
                return f"{other} is installed"
        parts = [(each, self._table.packages.get(each), False) for each in package.loads if each not in (TORCH, name)]
        parts = [each for each in parts if self._installed.version(each[0]) is not None]
        optional = filter(self._installed.has_module, package.tries)
        parts += ((each.partition(".")[0], self._table.find_package(each), True) for each in optional)
        for other, part, is_optional in parts:
            why = (
                "is not in the table"
                if part is None
                else (is_optional and part.refused) or self._installed.why_not_audited(part)
            )
            if why:
                return f"imports {other}, which {why}"
        return None

    def _is_order_independent(self, package: KnownPackage) -> bool:
        """Whether importing a package has the same result at any position in this program."""
        return package.order == "free" and not any(
            GLOBAL_SETTINGS_WORDS[each] & self._program.words for each in package.minds
        )

    def _why_excluded(self, package: KnownPackage) -> str | None:
        """Return why a package cannot be preloaded for this program, after the steps processed so far; or None."""
        if why := self._why_unusable(package.name):
            return why
        involved = [package, *(owner for module in package.tries if (owner := self._table.find_package(module)))]
        names = {name for each in involved for name in (each.name, *each.loads)}
        known = [self._table.packages[name] for name in names & self._table.packages.keys()]
        optional = {module.partition(".")[0] for module in (*package.tries, *package.seeks)}
        tops = optional.union(*(each.top_level_names for each in known))
        if path := self._shadowed.find_shadow(tops, names):
            return f"{os.path.relpath(path)} comes first"
        if self.barrier:
            return f"comes after {self.barrier}"
        if self._side_effect and not self._is_order_independent(package):
            return f"comes after {self._side_effect}, which may matter"
        if mentioned := self._program.words.intersection(package.sets):
            return f"sets {min(mentioned)}"
        step = self._find_setting(
            tops - {TORCH}, lambda name: any(each.reads_variable(name) if name else each.variables for each in involved)
        )
        return f"{step.where} {step.reason}" if step else None

    def _select(self, package: KnownPackage, step: Import) -> None:
        """Select the modules of ``package`` that a statement imports, or exclude them with the reason."""
        if why := self._why_excluded(package):
            self.excluded.setdefault(step.module if package.name in self.packages else step.top_level_name, why)
            return
        imported = {f"{step.module}.{name}" for name in step.names}
        for module, words in package.modules.items():
            loads_it = step.module == module or step.module.startswith(module + ".")
            if loads_it or module in imported or not set(words).isdisjoint(step.names):
                self._add(module, package)

    def _add(self, module: str, package: KnownPackage) -> None:
        """Add a module that ``package`` lists, unless this version lacks it or it is another, excluded, package's."""
        owner = self._table.find_package(module)
        if owner is None or (owner.name not in (package.name, TORCH) and self._why_excluded(owner)):
            return
        if not self._installed.has_module(module):
            return
        self.packages[package.name] = package
        if module not in self.modules:
            self.modules.append(module)
