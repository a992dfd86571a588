"""Records, in the zygote, what each module's import loads, looks for, reads and changes.

``module_handover`` needs it: a rank gets a preloaded module only if a fresh import would find all of this as it was.
What happens is attributed to the module whose import runs at that moment, whichever code it runs.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap
import builtins
import os
import sys
from _collections import defaultdict  # type: ignore[import-not-found, unused-ignore]
from _frozen_importlib import FrozenImporter
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import import_effects, namespace_record
    from ddplaunch.core.rank.import_effects import Changes, Inputs

    Namespace = dict[str, Any]
    """The attributes of a module or a class."""

else:
    import_effects = load_private_module("core/rank/import_effects")  # noqa: F821
    namespace_record = load_private_module("core/rank/namespace_record")  # noqa: F821

FILTERS, FINDERS, PATH_HOOKS = "warnings.filters", "sys.meta_path", "sys.path_hooks"
"""Lists that imports change, as they are named in messages."""

WORKING_FOLDER = "."
"""Stands among the variables that an import reads for the working folder."""

_INTERNAL = "<frozen importlib._bootstrap>"  # Python leaves frames of this file out of tracebacks and stacklevels
_MODULES_AT_A_TIME = 1024
_Module, _BUILTIN = type(sys), type(len)
_MAIN = ("__main__", "__mp_main__")

_find_origin, _stat, _getcwd = PathFinder.find_spec, os.stat, os.getcwd


class _BuiltinWrapper:
    """Replaces a builtin function: compares equal to it and, as class attribute, does not become a bound method."""

    __slots__ = ("function", "replaced")

    def __init__(self, function: Callable[..., Any], replaced: object) -> None:
        self.function, self.replaced = function, replaced

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.replaced

    def __hash__(self) -> int:
        return hash(self.replaced)  # as in ``os.stat in os.supports_follow_symlinks``

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


class ImportRecorder:
    """Records imports from its creation until ``finish``, by replacing the functions that they call."""

    def __init__(self, initial: Collection[str]) -> None:
        """``initial``: the modules of a fresh interpreter, which ranks have from the start."""
        self.initial = frozenset(initial)
        self.repaired: Collection[str] = ()  # modules that are repaired in each rank: they may read any variable
        self.prefix_readers: Mapping[str, str] = {}  # modules that read all variables with a prefix
        self.loaded: dict[str, dict[str, None]] = {"": {}}  # what each module, or "" the zygote, has imported
        self._inputs: dict[str, Inputs] = defaultdict(import_effects.Inputs)  # what else it has read and changed
        self.changes: dict[str, Changes] = defaultdict(import_effects.Changes)
        self._running = [""]  # names of the modules whose imports run, the innermost last
        self._clock = 0
        self._listed: list[str] = []
        self._random_state: object = None
        self._sees_warnings = self._sees_loggers = False
        self._begun: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._known, self._logger_count = set(sys.modules), 0
        self._lists = {name: list(items) for name, items in _copy_import_lists().items()}
        self.first_lists, self._lengths = dict(self._lists), (0, 0, 0)
        self._undo: list[tuple[Any, str, Any]] = []
        self._builtins: dict[int, _BuiltinWrapper] = {}  # what stands for builtin functions, by their ids
        self._cwd = current_folder() or "/"
        prefixes = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.__file__))}
        self._installation = tuple({each + os.sep for path in prefixes for each in (path, os.path.realpath(path))})
        self._installation += ("/proc/", "/sys/", "/dev/", "/usr/lib")
        self._unused_modules: list[Any] = []
        self._undo.append((bootstrap, "_new_module", bootstrap._new_module))  # type: ignore[attr-defined]
        bootstrap._new_module = self._new_module  # type: ignore[attr-defined]
        self._replace(bootstrap, "_find_and_load", self._wrap_find_and_load)
        self._replace(builtins, "__import__", self._wrap_import)
        self._replace(os, "stat", self._wrap_file_function)
        for name in ("open", "open_code"):
            self._replace(sys.modules["io"], name, self._wrap_file_function)
        self._replace(builtins, "open", self._wrap_file_function)
        self._replace(os, "getcwd", self._wrap_getcwd)
        self._replace(sys.modules.get("atexit") or __import__("atexit"), "register", self._wrap_atexit_register)
        environ_type: Any = type(os.environ)
        self._replace(PathFinder, "find_distributions", self._wrap_find_distributions)
        self._replace(environ_type, "__getitem__", self._wrap_environ_read)
        self._replace(environ_type, "__iter__", self._wrap_environ_listing)
        self._replace(environ_type, "__setitem__", self._wrap_environ_assignment)
        self._replace(environ_type, "__delitem__", self._wrap_environ_assignment)
        sys.meta_path.insert(0, self)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any], *, hides_frame: bool = True) -> None:
        real = getattr(owner, name)
        function = hide_frames(make(real)) if hides_frame else make(real)
        if type(real) is _BUILTIN and name != "__import__":
            function = self._builtins.setdefault(id(real), _BuiltinWrapper(function, real))  # io.open is builtins.open
        self._undo.append((owner, name, owner.__dict__[name] if isinstance(owner, type) else real))
        setattr(owner, name, function)

    def _new_module(self, name: str) -> ModuleType:
        """Create module objects next to each other in memory: a rank writes to each, which copies its memory page."""
        if not self._unused_modules:
            self._unused_modules = [_Module.__new__(_Module) for _ in range(_MODULES_AT_A_TIME)]
        module: ModuleType = self._unused_modules.pop()
        module.__init__(name)  # type: ignore[misc]
        return module

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Record the name that is imported; as the first import finder, this is called for each name."""
        if path is None:
            self._running_inputs.asked.add(name)

    @property
    def _running_inputs(self) -> Inputs:
        """The inputs of the module whose import runs."""
        return self._inputs[self._running[-1]]

    @property
    def _running_changes(self) -> Changes:
        return self.changes[self._running[-1]]

    def _note_changes(self) -> None:
        """Attribute what has changed since the last call to the module whose import runs."""
        last = self._lists
        filters = getattr(sys.modules.get("warnings"), "filters", ())
        if (len(filters), len(sys.meta_path) - 1, len(sys.path_hooks)) != self._lengths or (
            filters and filters != last[FILTERS]
        ):
            for name, items in _copy_import_lists(self).items():
                if items != last[name]:
                    if last[name]:
                        self._running_changes.lists.append((name, last[name], items))
                    else:  # Python's own warning filters, as the module warnings is imported
                        self.first_lists[name] = items
                    last[name] = items
            self._lengths = (len(last[FILTERS]), len(last[FINDERS]), len(last[PATH_HOOKS]))
        if not self._sees_warnings and "warnings" in sys.modules and self.first_lists[FILTERS]:
            self._sees_warnings = True
            self._replace(sys.modules["warnings"], "warn", self._wrap_warn, hides_frame=False)
        logging: Any = sys.modules.get("logging")
        if hasattr(logging, "root"):
            loggers = logging.root.manager.loggerDict
            if not self._sees_loggers:
                self._sees_loggers = True
                self._replace(logging.Logger, "isEnabledFor", self._wrap_is_enabled_for)
                self._replace(logging.Logger, "hasHandlers", self._wrap_has_handlers)
            if len(loggers) > self._logger_count:
                self._running_changes.loggers.update(
                    {name: loggers[name] for name in list(loggers)[self._logger_count :]}
                )
            self._logger_count = len(loggers)
        missing = len(sys.modules) - len(self._known)
        if missing < 0:
            self._known.intersection_update(sys.modules)
            missing = len(sys.modules) - len(self._known)
        if missing:
            new = []
            for name in reversed(sys.modules):
                if name not in self._known:
                    new.append(name)
                    if len(new) >= missing:
                        break
            self._known.update(new)
            self.loaded[self._running[-1]].update(dict.fromkeys(reversed(new)))

    def _note_random_state(self, name: str, begun: int) -> None:
        """Note whether the import of a package has taken random numbers: any of its modules may have done so."""
        top = name.partition(".")[0]
        if top == self._running[-2].partition(".")[0] or (import_effects.is_stdlib(name) and name != "random"):
            return
        state = random_state(sys.modules)
        if state != self._random_state and self._random_state is not None:
            for each in [each for each, moment in self._begun.items() if moment >= begun]:
                self._inputs[each].marks.add(import_effects.MOVES_RANDOM)
        self._random_state = state

    def _wrap_find_and_load(self, real: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        def _find_and_load(name: str, import_: Any) -> Any:
            self.loaded[self._running[-1]][name] = None
            if name in sys.modules:
                return real(name, import_)
            self._note_changes()
            self._running.append(name)
            self.loaded.setdefault(name, {})
            self._clock = begun = self._clock + 1
            self._begun.setdefault(name, begun)
            try:
                return real(name, import_)
            finally:
                self._note_changes()
                self._note_random_state(name, begun)
                self._running.pop()
                if name not in sys.modules:
                    self._known.discard(name)
                self._clock += 1
                self._ended.setdefault(name, self._clock)

        return _find_and_load

    def _wrap_import(self, real: Any) -> Any:
        def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            result = real(name, globals, locals, fromlist, level)
            if level and globals:
                package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
                base = package.rsplit(".", level - 1)[0]
                name = f"{base}.{name}" if name else base
            loaded = self.loaded[self._running[-1]]
            loaded[name] = None
            for each in fromlist if fromlist and hasattr(result, "__path__") else ():
                if (child := f"{name}.{each}") in sys.modules:
                    loaded[child] = None
            return result

        return __import__

    def _wrap_file_function(self, real: Any) -> Any:
        def record_and_call(path: Any, *args: Any, **named: Any) -> Any:
            if type(path) is str or hasattr(path, "__fspath__"):
                given = os.fsdecode(path)
                text = os.path.join(self._cwd, given)
                if not text.startswith(self._installation):
                    self._running_inputs.files.add(text)
                    if not given.startswith(os.sep):
                        self._running_inputs.variables.setdefault(WORKING_FOLDER, self._cwd)
            return real(path, *args, **named)

        return record_and_call

    def _wrap_getcwd(self, real: Callable[[], str]) -> Callable[[], str]:
        def getcwd() -> str:
            self._running_inputs.variables[WORKING_FOLDER] = folder = real()
            return folder

        return getcwd

    def _wrap_environ_read(self, real: Any) -> Any:
        def __getitem__(environ: Any, name: Any) -> Any:
            if self._listed and self._listed[-1] == name:
                self._listed.pop()
            elif type(name) is str and self._running[-1] not in self.repaired:
                self._listed = []
                self._running_inputs.variables.setdefault(name, _decode(environ._data.get(os.fsencode(name))))
            return real(environ, name)

        return __getitem__

    def _wrap_environ_listing(self, real: Any) -> Any:
        """Wrap ``os.environ.__iter__`` to record the names: a copy of the environment reads all in this order."""

        def __iter__(environ: Any) -> Any:
            names = list(real(environ))
            self._listed = names[::-1]
            return iter(names)

        return __iter__

    def _wrap_find_distributions(self, real: Any) -> Any:
        def find_distributions(context: Any = None) -> Any:
            self._running_inputs.distributions.add(distribution_key(getattr(context, "name", None) or ""))
            return real() if context is None else real(context)

        return find_distributions

    def _wrap_atexit_register(self, real: Any) -> Any:
        def register(function: Any, *args: Any, **named: Any) -> Any:
            self._running_changes.exits.append((function, args, named))
            return real(function, *args, **named)

        return register

    def _wrap_environ_assignment(self, real: Any) -> Any:
        def record_and_assign(environ: Any, name: str, *value: str) -> None:
            before = _decode(environ._data.get(os.fsencode(name)))
            real(environ, name, *value)
            changed = self._running_changes.variables
            changed[name] = changed.get(name, (before,))[0], value[0] if value else None

        return record_and_assign

    def _wrap_warn(self, real: Any) -> Any:
        def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **named: Any) -> None:
            self._running_inputs.marks.add(import_effects.WARNED)
            real(message, category, stacklevel + 1, *args, **named)

        return warn

    def _wrap_is_enabled_for(self, real: Any) -> Any:
        def isEnabledFor(logger: Any, level: int) -> bool:
            result: bool = real(logger, level)
            self._running_inputs.levels[logger.name, level] = result
            return result

        return isEnabledFor

    def _wrap_has_handlers(self, real: Any) -> Any:
        def hasHandlers(logger: Any) -> bool:
            self._running_inputs.handlers[logger.name] = result = bool(real(logger))
            return result

        return hasHandlers

    def stop(self) -> None:
        """Stop recording."""
        self._note_changes()
        sys.meta_path.remove(self)
        self._restore()

    def finish(self) -> None:
        """Stop recording, and note the state with which ``module_handover`` compares that of a rank."""
        self.stop()
        for name in self.prefix_readers.keys() & self.loaded.keys():
            self._inputs[name].prefixes.add(self.prefix_readers[name])
        every = self._inputs.values()
        asked = set[str]().union(*(each.asked for each in every))
        self.origins = {name: _loaded_origin(sys.modules.get(name)) or find_origin(name) for name in asked}
        self.files = {path: file_state(path) for path in set[str]().union(*(each.files for each in every))}
        self.path = {each: file_state(each, is_folder=True) for each in sys.path}
        self.packed_inputs = {name: each.pack() for name, each in self._inputs.items()}
        self.late_children = frozenset(name for name in self.list_added() if self._is_late_child(name))
        self.namespaces = namespace_record.NamespaceRecord(sys.modules, self.initial)
        preloaded = self.list_added()
        self.packages = frozenset(name for name in preloaded if not import_effects.is_stdlib(name))
        origins = {name: str(_loaded_origin(sys.modules[name])) for name in self.packages}
        self.native = frozenset(name for name, origin in origins.items() if origin.endswith(".so"))
        others = [name for name in self.packages if name.partition(".")[0] != "torch"]
        self.torch_users = frozenset(name for name in others if "torch" in self.loaded.get(name, ()))
        self.logger_class = logger_class(sys.modules)
        expected = {name.rsplit(".", count)[0] for name in self.loaded[""] for count in range(name.count(".") + 1)}
        self.closures = {name: self.closure(name) for name in expected.intersection(preloaded)}

    def has_read_variable(self, names: Collection[str]) -> bool:
        """Whether an import has read one of these variables."""
        return any(
            name in inputs.variables or name.startswith(tuple(inputs.prefixes))
            for inputs in self._inputs.values()
            for name in names
        )

    def _restore(self) -> None:
        """Put the replaced functions back, also where modules and classes have kept one: ``tarfile.bltn_open``."""
        wrappers = {}
        for owner, name, value in reversed(self._undo):
            wrappers[id(owner.__dict__[name])] = value
            setattr(owner, name, value)
        for module_name, module in list(sys.modules.items()):
            namespace = getattr(module, "__dict__", {})
            spaces: list[tuple[Any, Any]] = [(module, namespace)]
            if import_effects.is_stdlib(module_name):
                spaces += [(each, each.__dict__) for each in namespace.values() if type(each) is type]
            for kept_in, space in spaces:
                if not wrappers.keys().isdisjoint(map(id, space.values())):
                    for name in [name for name, value in space.items() if id(value) in wrappers]:
                        setattr(kept_in, name, wrappers[id(space[name])])

    def _is_late_child(self, name: str) -> bool:
        """Whether a module is an attribute of its parent, but was not imported by the parent's own import."""
        parent, _, child = name.rpartition(".")
        is_own = self._begun.get(parent, 0) < self._begun.get(name, 0) <= self._ended.get(parent, sys.maxsize)
        namespace: Namespace = {} if is_own or not parent else getattr(sys.modules.get(parent), "__dict__", {})
        return namespace.get(child) is sys.modules[name]

    def list_added(self) -> list[str]:
        """List the loaded modules that a fresh interpreter does not have, in the order of their loading."""
        return [name for name in list(sys.modules) if name not in self.initial and name not in _MAIN]

    def closure(self, name: str) -> set[str]:
        """Return the modules that are loaded once ``name`` was imported: its parent, what it imports, and so on."""
        names, todo = {name}, [name]
        while todo:
            last = todo.pop()
            new = {last.rpartition(".")[0] or name, *self.loaded.get(last, ())} - names
            names |= new
            todo.extend(new)
        return names


def hide_frames(function: Any) -> Any:
    """Mark a function as importlib's, so that tracebacks and ``stacklevel`` of warnings skip its frames."""
    function.__code__ = function.__code__.replace(co_filename=_INTERNAL)
    return function


hide_frames(_BuiltinWrapper.__call__)


def find_origin(name: str, path: Sequence[str] | None = None) -> object:
    """Return where a module would be imported from by the usual finders; None if it would not be found."""
    if path is None and name in sys.builtin_module_names:
        return "built-in"
    if path is None and FrozenImporter.find_spec(name) is not None:
        return "frozen"
    try:
        spec = _find_origin(name, path)
    except Exception as error:
        return type(error).__name__
    if spec is not None and spec.origin is not None:
        return spec.origin
    return None if spec is None else tuple(spec.submodule_search_locations or ())


def _loaded_origin(module: object) -> object:
    return getattr(getattr(module, "__spec__", None), "origin", None)


def current_folder() -> str | None:
    """Return the working folder; None if it was removed."""
    try:
        return _getcwd()
    except OSError:
        return None


def file_state(path: str, *, is_folder: bool = False) -> tuple[int, ...] | None:
    """Return a value that changes when a file is written, or a folder on ``sys.path`` gets entries; None if absent."""
    try:
        state = _stat(path)
    except (OSError, ValueError):
        return None
    if state.st_mode & 0o170000 == 0o40000 and not is_folder:
        return ()
    return state.st_mtime_ns, state.st_size, state.st_ino


def random_state(modules: Mapping[str, Any]) -> object:
    """Return the state of the generator of the module random; None if that is not among ``modules``."""
    generator = getattr(modules.get("random"), "_inst", None)
    return None if generator is None else generator.getstate()


def logger_class(modules: Mapping[str, Any]) -> object:
    """Return the class of new loggers; None if logging is not among ``modules``."""
    logging: Any = modules.get("logging")
    return None if not hasattr(logging, "root") else logging.root.manager.loggerClass or logging.getLoggerClass()


def distribution_key(name: str) -> str:
    """Return the normalized name of a distribution, which is equal for all of its spellings."""
    return name.lower().replace("-", "_").replace(".", "_")


def _decode(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _copy_import_lists(recorder: object = None) -> dict[str, list[Any]]:
    filters: list[Any] = getattr(sys.modules.get("warnings"), "filters", [])
    finders = [each for each in sys.meta_path if each is not recorder]
    return {FILTERS: list(filters), FINDERS: finders, PATH_HOOKS: list(sys.path_hooks)}
