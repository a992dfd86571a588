"""Compares the state of a rank with the state in which modules were preloaded: would a fresh import differ?

``module_handover`` has the rules; like there, nothing may be imported here.
"""

from __future__ import annotations

import _imp
import os
import sys
from _frozen_importlib import BuiltinImporter, ModuleSpec
from _io import FileIO
from _operator import is_ as _is

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ddplaunch.core.rank import import_effects, import_recorder, inspection_endpoint, rank_exit
    from ddplaunch.core.rank.hidden_modules import HiddenModules, ImportSummary
else:
    import_effects = load_private_module("core/rank/import_effects")  # noqa: F821
    import_recorder = load_private_module("core/rank/import_recorder")  # noqa: F821
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")  # noqa: F821
    rank_exit = load_private_module("core/rank/rank_exit")  # noqa: F821

FILTERS, FINDERS, PATH_HOOKS = import_recorder.FILTERS, import_recorder.FINDERS, import_recorder.PATH_HOOKS

_THREAD_POOLS = {
    *("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"),
    *("scipy.linalg._fblas", "sklearn.utils._openmp_helpers", "torch._C"),
}
"""Modules in native code that count the CPUs of the process as they are loaded."""

LIBRARY_SCANNERS = ("threadpoolctl",)
"""Modules whose functions change all native libraries that are loaded; without preloading, these would be fewer."""

_METADATA = (".dist-info", ".egg-info")

OF_THREAD_POOLS = tuple("gomp_ goto_ kmp_ mkl_ omp_ openblas_".upper().split())
"""Beginnings of the variables that ``_THREAD_POOLS`` read, and no other native code does."""


class ImportCheck:
    """Finds how the state of a rank differs from that of the preload; created before the rank's program starts."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden, self._record, self._modules = hidden, hidden.record, hidden.modules
        self.environment = {**native_environment(), **hidden.settings}  # as it is expected; imports change it
        self.lists = _copy_import_lists(hidden.every)  # the same
        self._import = sys.modules["builtins"].__dict__["__import__"]
        self._random_state = import_recorder.random_state(hidden.every)
        self._affinity, self._dlopen_flags = os.sched_getaffinity(0), sys.getdlopenflags()

    def find_difference(self, summary: ImportSummary) -> str | None:
        """Return how a fresh import of these modules would differ from the recorded import; None if it would not."""
        checks = [
            self._find_other_module,
            self._find_other_origin,
            self._find_changed_variable,
            self._find_new_metadata,
        ]
        checks += [self._find_changed_logger]
        if summary.has_packages:
            checks += [
                self._find_native_difference,
                self._find_changed_hook,
                self._find_changed_file,
                self._find_new_warning_filter,
            ]
            checks += [self._find_patched_function, self._find_random_use, self._find_changed_torch_default]
        return next(filter(None, (check(summary) for check in checks)), None)

    def _find_other_module(self, summary: ImportSummary) -> str | None:
        every, closure = self._hidden.every, summary.closure
        for name in self._modules.keys() & sys.modules.keys():
            # The same one is there while it is being handed over, when a signal handler imports.
            is_other = sys.modules.get(name) is not every[name]
            if is_other and name in closure and ("." in name or has_spec(every[name])):
                return f"another module {name} is in sys.modules"
        for name in list(self._hidden.taken):
            now = sys.modules.get(name)
            if (
                name in closure
                and now is not every[name]
                and (has_spec(every[name]) or (now is not None and "." in name))
            ):
                return f"{'no' if now is None else 'another'} module {name} is in sys.modules"
        return None

    def _find_other_origin(self, summary: ImportSummary) -> str | None:
        record, asked = self._record, summary.inputs.asked
        for name in [each for each in list(sys.modules) if each in asked]:
            if name not in self._hidden.every and name not in record.initial:
                return f"a module {name} is in sys.modules"
        added = [each for each in sys.path if each not in record.path]
        usual = [each for each in sys.path if each in record.path]
        is_usual = usual == list(record.path) and all(
            import_recorder.file_state(each, is_folder=True) == state for each, state in record.path.items()
        )
        names = _list_module_names(added) if is_usual else None
        for top in asked if names is None else [each for each in names if each in asked]:
            if top not in sys.modules:
                origin = import_recorder.find_origin(top)
                if origin != record.origins[top]:
                    return f"{top} is {_format_origin(origin)}, not {_format_origin(record.origins[top])}"
        return None

    def _find_new_metadata(self, summary: ImportSummary) -> str | None:
        """Report metadata of a distribution that the imports look up, in a folder that the zygote did not search."""
        for folder in (
            [each for each in sys.path if each not in self._record.path] if summary.inputs.distributions else ()
        ):
            for entry in list_folder(folder):
                if entry.endswith(_METADATA):
                    name = import_recorder.distribution_key(entry.rpartition(".")[0].partition("-")[0])
                    is_plugin = "" in summary.inputs.distributions and _has_plugins(os.path.join(folder, entry))
                    if name in summary.inputs.distributions or is_plugin:
                        return f"{os.path.join(folder, entry)} has other metadata"
        return None

    def _find_changed_variable(self, summary: ImportSummary) -> str | None:
        seen, now = summary.inputs.variables, _variables()
        if import_recorder.WORKING_FOLDER in seen:
            folder, before = import_recorder.current_folder(), seen[import_recorder.WORKING_FOLDER]
            if folder != before:
                return f"the working folder is {folder}, not {before}"
        changed = {*now, *self.environment, *seen} - {import_recorder.WORKING_FOLDER}
        for name in sorted(each for each in changed if each in seen and now.get(each) != seen[each]):
            return f"{name} is {_format_variable(now.get(name))}, not {_format_variable(seen[name])}"
        for name in sorted(each for each in changed if each.startswith(tuple(summary.inputs.prefixes))):
            if now.get(name) != self.environment.get(name):
                return (
                    f"{name} is {_format_variable(now.get(name))}, not {_format_variable(self.environment.get(name))}"
                )
        return None

    def _find_native_difference(self, summary: ImportSummary) -> str | None:
        """Report a difference in what native code reads when it is loaded: variables, CPUs, dlopen flags."""
        native = summary.native
        if not native:
            return None
        now, before = native_environment(), self.environment
        makes_threads = not native.isdisjoint(_THREAD_POOLS)
        for name in sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)):
            if self._hidden.native_reads.fullmatch(name) and (makes_threads or not name.startswith(OF_THREAD_POOLS)):
                return f"{name} is {_format_variable(now.get(name))}, not {_format_variable(before.get(name))}"
        if makes_threads and os.sched_getaffinity(0) != self._affinity:
            return "the CPUs of the process are others"
        if sys.getdlopenflags() != self._dlopen_flags:
            return "sys.setdlopenflags was called"
        found = [each for each in LIBRARY_SCANNERS if each in sys.modules and each not in self._hidden.included]
        if makes_threads and found:
            return f"{found[0]} was imported before, which changes all libraries that are loaded"
        return None

    def _find_changed_hook(self, summary: ImportSummary) -> str | None:
        if sys.modules["builtins"].__import__ is not self._import:
            return "builtins.__import__ was replaced"
        if sys.gettrace() is not None or sys.getprofile() is not None:
            return "a trace or profile function is set"
        now, usual = _copy_import_lists(self._hidden.every), self.lists
        added = [each for each in now[FINDERS] if each not in usual[FINDERS]]
        kept = [each for each in now[FINDERS] if each not in added]
        if kept != usual[FINDERS] or now[PATH_HOOKS] != usual[PATH_HOOKS]:
            return "the import system was changed"
        if any(map(_is_user_finder, added)):
            return "the program has a finder of its own"
        asked = summary.inputs.asked - sys.modules.keys() if added else ()
        found = [name for finder in added for name in asked if finder.find_spec(name, None, None) is not None]
        return f"another finder has {found[0]}" if found else None

    def _find_changed_file(self, summary: ImportSummary) -> str | None:
        for path in summary.inputs.files:
            if import_recorder.file_state(path) != self._record.files[path]:
                return f"{path} was changed"
        return None

    def _find_new_warning_filter(self, summary: ImportSummary) -> str | None:
        """Report new warning filters, if the imports warn; a filter that ignores warnings makes no difference."""
        if import_effects.WARNED not in summary.inputs.marks:
            return None
        usual = self.lists[FILTERS]
        added = [each for each in _filters(self._hidden.every) if each[0] != "ignore" and each not in usual]
        return "warning filters were added" if added else None

    def _find_changed_logger(self, summary: ImportSummary) -> str | None:
        logging: Any = sys.modules.get("logging")
        if not hasattr(logging, "root"):  # its own import runs, or it was not imported
            return None
        loggers, root = logging.root.manager.loggerDict, logging.root
        if summary.loggers and import_recorder.logger_class(sys.modules) is not self._record.logger_class:
            return "loggers have another class"
        for name, had_handlers in summary.inputs.handlers.items():
            parts = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
            if any(getattr(each, "handlers", ()) for each in (root, *map(loggers.get, parts))) != had_handlers:
                return f"the logger {name} has other handlers"
        for name in [each for each in list(loggers) if each in summary.loggers]:
            if loggers[name] is not summary.loggers[name] and not hasattr(loggers[name], "loggerMap"):
                return f"the logger {name} exists"
        for (name, level), was_enabled in summary.inputs.levels.items():
            chain = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)] if name != "root" else []
            levels = [getattr(summary.loggers.get(part) or loggers.get(part), "level", 0) for part in chain]
            effective = next(filter(None, levels), root.level)
            if (root.manager.disable < level and level >= effective) != was_enabled:
                return f"the level of the logger {name} is another"
        return None

    def _find_random_use(self, summary: ImportSummary) -> str | None:
        """Report that the program has seeded or used ``random``, if an import takes random numbers from it."""
        if import_effects.MOVES_RANDOM not in summary.inputs.marks:
            return None
        is_other = import_recorder.random_state(sys.modules) not in (None, self._random_state)
        return "random was seeded or used before" if is_other else None

    def _find_patched_function(self, summary: ImportSummary) -> str | None:
        """Report a replaced function or class in a module that the imports use or that Python loads at start.

        A function of another package counts if the new modules have kept it: their imports call few of them.
        """
        for name, replaced in self._record.namespaces.list_replaced(summary.closure):
            if import_effects.is_stdlib(name) or self._keeps_replaced_object(summary.new, replaced):
                return f"{name} was patched"
        return None

    def _keeps_replaced_object(self, new: list[str], replaced: list[object]) -> bool:
        """Whether new modules hold one of the replaced objects, or one of these is a class."""
        if any(isinstance(each, type) for each in replaced):
            return True
        known = {id(each) for each in replaced}
        return any(
            id(value) in known for each in new for value in getattr(self._modules[each], "__dict__", {}).values()
        )

    def _find_changed_torch_default(self, summary: ImportSummary) -> str | None:
        """Report changed defaults for new tensors, if an imported module other than torch's own uses torch."""
        torch: Any = self._hidden.every.get("torch")
        if not (summary.uses_torch and _is(sys.modules.get("torch"), torch)):
            return None
        try:
            context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            usual = torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled() and context is None
        except AttributeError:  # of another version
            return None
        return None if usual else "torch has another default dtype or device, or no gradients"


def has_spec(module: object) -> bool:
    """Whether a module was imported; native code makes others if they are missing, as ``cython_runtime``."""
    return getattr(module, "__spec__", None) is not None


def native_environment() -> dict[str, str]:
    """Return the environment that native code sees: a new copy of the module ``posix`` reads it."""
    importer: Any = BuiltinImporter
    module: Any = _imp.create_builtin(ModuleSpec("posix", importer, origin="built-in"))
    _imp.exec_builtin(module)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in module.environ.items()}


def _list_module_names(folders: list[str]) -> set[str] | None:
    """Return the possible module names in these entries of ``sys.path``; None if an entry is an archive."""
    if any(map(os.path.isfile, folders)):
        return None
    return {entry.partition(".")[0] for folder in folders for entry in list_folder(folder)}


def list_folder(folder: str) -> list[str]:
    """List the entries of a folder; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _has_plugins(metadata: str) -> bool:
    """Whether a distribution has entry points that are not commands."""
    try:
        with FileIO(os.path.join(metadata, "entry_points.txt")) as file:
            lines = file.read().split(b"\n")
    except OSError:
        return False
    groups = {line.strip() for line in lines if line.startswith(b"[")}
    return not groups <= {b"[console_scripts]", b"[gui_scripts]"}


def _is_user_finder(finder: object) -> bool:
    """Whether an import finder comes from the program itself and not from an installed package."""
    kind = finder if isinstance(finder, type) else type(finder)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return not isinstance(file, str) or rank_exit.is_user_file(file)


def _variables() -> dict[str, str]:
    """The environment that an import sees; empty if the program has replaced ``os.environ`` by something else."""
    try:
        return dict(os.environ)
    except Exception:
        return {}


def _format_variable(value: str | None) -> str:
    return "unset" if value is None else repr(value[:100])


def _format_origin(origin: object) -> str:
    return "missing" if origin is None else str(origin)


def _filters(modules: Mapping[str, Any]) -> list[Any]:
    return getattr(modules.get("warnings") or sys.modules.get("warnings"), "filters", [])


def _copy_import_lists(modules: Mapping[str, Any]) -> dict[str, list[Any]]:
    finders = [each for each in sys.meta_path if not isinstance(each, inspection_endpoint.PostImportHook)]
    return {FILTERS: list(_filters(modules)), FINDERS: finders, PATH_HOOKS: list(sys.path_hooks)}
