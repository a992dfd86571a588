"""Records, in the zygote, what each module's import loads, looks for, reads and changes.

``module_handover`` needs it: a rank gets a preloaded module only if a fresh import would find all of this as it was.
What happens is attributed to the module whose import runs at that moment, whichever code it runs.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap
import builtins
import os
import sys
from _frozen_importlib import FrozenImporter
from _frozen_importlib_external import PathFinder
from _operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import import_effects
    from ddplaunch.core.rank.import_effects import Effects, ImportSummary

    Namespace = dict[str, Any]
    """The attributes of a module."""

    Snapshot = tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], tuple[object, ...]], tuple[object, ...]]
    """A namespace, a getter of its functions and classes, and what the getter returned."""

else:
    import_effects = load_private_module("core/rank/import_effects")  # noqa: F821

FILTERS, FINDERS, PATH_HOOKS = "warnings.filters", "sys.meta_path", "sys.path_hooks"
"""Lists that imports change, as they are named in messages."""

WORKING_FOLDER = "."
"""Stands among the variables that an import reads for the working folder."""

_INTERNAL = "<frozen importlib._bootstrap>"  # Python leaves frames of this file out of tracebacks and stacklevels
_BUILTIN = type(len)
_CODE_KINDS = (type(lambda: None), _BUILTIN, type)
_UNCOMPARED = {
    "builtins": {"print", "input", "breakpoint"},
    "threading": {"excepthook"},
    "importlib._bootstrap": {"_find_and_load", "_find_and_load_unlocked"},
    "importlib._bootstrap_external": {"_write_atomic"},
}
"""Functions that programs often replace, and that no import calls or stores; and those that ddplaunch replaces."""

_OUTERMOST = 2  # modules that run: the zygote's own code, and an import of it

_MAIN = ("__main__", "__mp_main__")
_UNCOMPARED_MODULES = {*_MAIN, "sys", "_frozen_importlib", "_frozen_importlib_external"}

_find_origin, _stat, _getcwd = PathFinder.find_spec, os.stat, os.getcwd


class _Builtin:
    """Calls a function in place of a builtin one: equal to that, and not bound as a method as attribute of a class."""

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
        self.effects: dict[str, Effects] = {"": import_effects.Effects()}  # by module; "" is the zygote's own code
        self._running = [""]  # names of the modules whose imports run, the innermost last
        self._clock = 0
        self._listed: list[str] = []
        self._random_state: object = None
        self._sees_warnings = self._sees_loggers = False
        self._begun: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._known, self._logger_count = set(sys.modules), 0
        self._lists = {name: list(items) for name, items in _changeable_lists().items()}
        self.first_lists, self._lengths = dict(self._lists), (0, 0, 0)
        self._undo: list[tuple[Any, str, Any]] = []
        self._builtins: dict[int, _Builtin] = {}  # what stands for builtin functions, by their ids
        self._cwd = current_folder() or "/"
        prefixes = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.__file__))}
        self._installation = tuple({each + os.sep for path in prefixes for each in (path, os.path.realpath(path))})
        self._installation += ("/proc/", "/sys/", "/dev/", "/usr/lib")
        self._replace(bootstrap, "_find_and_load", self._record_load)
        self._replace(builtins, "__import__", self._record_import)
        self._replace(os, "stat", self._record_file)
        for name in ("open", "open_code"):
            self._replace(sys.modules["io"], name, self._record_file)
        self._replace(builtins, "open", self._record_file)
        self._replace(os, "getcwd", self._record_getcwd)
        self._replace(sys.modules.get("atexit") or __import__("atexit"), "register", self._record_exit)
        environ_type: Any = type(os.environ)
        self._replace(PathFinder, "find_distributions", self._record_distribution)
        self._replace(environ_type, "__getitem__", self._record_read)
        self._replace(environ_type, "__iter__", self._record_listing)
        self._replace(environ_type, "__setitem__", self._record_assignment)
        self._replace(environ_type, "__delitem__", self._record_assignment)
        sys.meta_path.insert(0, self)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any], *, hides_frame: bool = True) -> None:
        real = getattr(owner, name)
        function = hide_frames(make(real)) if hides_frame else make(real)
        if type(real) is _BUILTIN and name != "__import__":
            function = self._builtins.setdefault(id(real), _Builtin(function, real))  # io.open is builtins.open
        self._undo.append((owner, name, owner.__dict__[name] if isinstance(owner, type) else real))
        setattr(owner, name, function)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Import finder: as the first one it is asked for each name."""
        if path is None:
            self._top.asked.add(name)

    @property
    def _top(self) -> Effects:
        return self.effects[self._running[-1]]

    def _note_changes(self) -> None:
        """Attribute what has changed since the last call to the module whose import runs."""
        top = self._top
        last = self._lists
        filters = getattr(sys.modules.get("warnings"), "filters", ())
        if (len(filters), len(sys.meta_path) - 1, len(sys.path_hooks)) != self._lengths or (
            filters and filters != last[FILTERS]
        ):
            for name, items in _changeable_lists(self).items():
                if items != last[name]:
                    if last[name]:
                        top.lists.append((name, last[name], items))
                    else:  # Python's own warning filters, as the module warnings is imported
                        self.first_lists[name] = items
                    last[name] = items
            self._lengths = (len(last[FILTERS]), len(last[FINDERS]), len(last[PATH_HOOKS]))
        if not self._sees_warnings and "warnings" in sys.modules and self.first_lists[FILTERS]:
            self._sees_warnings = True
            self._replace(sys.modules["warnings"], "warn", self._record_warning, hides_frame=False)
        logging: Any = sys.modules.get("logging")
        if hasattr(logging, "root"):
            loggers = logging.root.manager.loggerDict
            if not self._sees_loggers:
                self._sees_loggers = True
                self._replace(logging.Logger, "isEnabledFor", self._record_level)
                self._replace(logging.Logger, "hasHandlers", self._record_handlers)
            if len(loggers) > self._logger_count:
                top.loggers.update({name: loggers[name] for name in list(loggers)[self._logger_count :]})
            self._logger_count = len(loggers)
        if missing := len(sys.modules) - len(self._known):
            new = []
            for name in reversed(sys.modules):
                if name not in self._known:
                    new.append(name)
                    if len(new) >= missing:
                        break
            self._known.update(new)
            top.loaded.update(dict.fromkeys(reversed(new)))

    def _note_random_state(self, name: str) -> None:
        """Note whether an import has taken random numbers: the audit has shown that no module of torch does."""
        is_inner = len(self._running) > _OUTERMOST
        if is_inner and name != "random" and (name.startswith("torch.") or import_effects.is_stdlib(name)):
            return
        state = random_state(sys.modules)
        if state != self._random_state:
            self._top.moves_random = self._random_state is not None
            self._random_state = state

    def _record_load(self, real: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        def _find_and_load(name: str, import_: Any) -> Any:
            self._note_changes()
            self._top.loaded[name] = None
            self._running.append(name)
            self.effects.setdefault(name, import_effects.Effects())
            self._clock += 1
            self._begun.setdefault(name, self._clock)
            try:
                return real(name, import_)
            finally:
                self._note_changes()
                self._note_random_state(name)
                self._running.pop()
                self._clock += 1
                self._ended.setdefault(name, self._clock)

        return _find_and_load

    def _record_import(self, real: Any) -> Any:
        def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            result = real(name, globals, locals, fromlist, level)
            if level and globals:
                package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
                base = package.rsplit(".", level - 1)[0]
                name = f"{base}.{name}" if name else base
            loaded = self._top.loaded
            loaded[name] = None
            for each in fromlist or ():
                if (child := f"{name}.{each}") in sys.modules:
                    loaded[child] = None
            return result

        return __import__

    def _record_file(self, real: Any) -> Any:
        def probe(path: Any, *args: Any, **named: Any) -> Any:
            if type(path) is str or hasattr(path, "__fspath__"):
                given = os.fsdecode(path)
                text = os.path.join(self._cwd, given)
                if not text.startswith(self._installation):
                    self._top.files.add(text)
                    if not given.startswith(os.sep):
                        self._top.reads.setdefault(WORKING_FOLDER, self._cwd)
            return real(path, *args, **named)

        return probe

    def _record_getcwd(self, real: Callable[[], str]) -> Callable[[], str]:
        def getcwd() -> str:
            self._top.reads[WORKING_FOLDER] = folder = real()
            return folder

        return getcwd

    def _record_read(self, real: Any) -> Any:
        def __getitem__(environ: Any, name: Any) -> Any:
            if self._listed and self._listed[-1] == name:
                self._listed.pop()
            elif type(name) is str and self._running[-1] not in self.repaired:
                self._listed = []
                self._top.reads.setdefault(name, _decode(environ._data.get(os.fsencode(name))))
            return real(environ, name)

        return __getitem__

    def _record_listing(self, real: Any) -> Any:
        """Remember the names: a copy of the environment, made for a child process, reads all in this order."""

        def __iter__(environ: Any) -> Any:
            names = list(real(environ))
            self._listed = names[::-1]
            return iter(names)

        return __iter__

    def _record_distribution(self, real: Any) -> Any:
        def find_distributions(context: Any = None) -> Any:
            self._top.distributions.add(distribution_key(getattr(context, "name", None) or ""))
            return real() if context is None else real(context)

        return find_distributions

    def _record_exit(self, real: Any) -> Any:
        def register(function: Any, *args: Any, **named: Any) -> Any:
            self._top.exits.append((function, args, named))
            return real(function, *args, **named)

        return register

    def _record_assignment(self, real: Any) -> Any:
        def assign(environ: Any, name: str, *value: str) -> None:
            before = _decode(environ._data.get(os.fsencode(name)))
            real(environ, name, *value)
            self._top.variables[name] = self._top.variables.get(name, (before,))[0], value[0] if value else None

        return assign

    def _record_warning(self, real: Any) -> Any:
        def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **named: Any) -> None:
            self._top.warned = True
            real(message, category, stacklevel + 1, *args, **named)

        return warn

    def _record_level(self, real: Any) -> Any:
        def isEnabledFor(logger: Any, level: int) -> bool:
            result: bool = real(logger, level)
            self._top.levels[logger.name, level] = result
            return result

        return isEnabledFor

    def _record_handlers(self, real: Any) -> Any:
        def hasHandlers(logger: Any) -> bool:
            self._top.handlers[logger.name] = result = bool(real(logger))
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
        for name in self.prefix_readers.keys() & self.effects.keys():
            self.effects[name].prefix = self.prefix_readers[name]
        every = self.effects.values()
        asked = set[str]().union(*(each.asked for each in every))
        self.origins = {name: _loaded_origin(sys.modules.get(name)) or find_origin(name) for name in asked}
        self.files = {path: file_state(path) for path in set[str]().union(*(each.files for each in every))}
        self.path = {each: file_state(each, is_folder=True) for each in sys.path}
        self.late_children = {name: namespace for name in sys.modules if (namespace := self._find_late_parent(name))}
        self.functions = {
            name: list(_snapshot_module(name, module, with_classes=import_effects.is_stdlib(name)))
            for name, module in list(sys.modules.items())
            if name not in _UNCOMPARED_MODULES and hasattr(module, "__dict__")
        }
        preloaded = self.list_added()
        self.native = frozenset(name for name in preloaded if _is_native(name))
        self.logger_class = logger_class(sys.modules)
        self.summaries: dict[str, tuple[set[str], ImportSummary]] = {}  # of what the zygote itself has imported
        for name in self.effects[""].loaded.keys() & set(preloaded):
            closure = self.closure(name)
            new = [each for each in preloaded if each in closure]
            self.summaries[name] = closure, import_effects.ImportSummary(new, self.effects, self.native)

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

    def _find_late_parent(self, name: str) -> Namespace | None:
        """Return the namespace of a module's parent if it has the module as attribute, not set by its own import."""
        parent, _, child = name.rpartition(".")
        is_own = self._begun.get(parent, 0) < self._begun.get(name, 0) <= self._ended.get(parent, sys.maxsize)
        if not parent or name in self.initial or is_own:
            return None
        namespace: Namespace = getattr(sys.modules.get(parent), "__dict__", {})
        return namespace if namespace.get(child) is sys.modules[name] else None

    def list_added(self) -> list[str]:
        """List the loaded modules that a fresh interpreter does not have, in the order of their loading."""
        return [name for name in list(sys.modules) if name not in self.initial and name not in _MAIN]

    def closure(self, name: str) -> set[str]:
        """Return the modules that are loaded once ``name`` has been imported: what it has imported, and so on."""
        found, todo = {name}, [name]
        while todo:
            effects = self.effects.get(todo.pop())
            new = effects.loaded.keys() - found if effects is not None else ()
            found.update(new)
            todo.extend(new)
        return found


def hide_frames(function: Any) -> Any:
    """Make a function's frames ones of importlib, which are not in tracebacks and not counted by ``stacklevel``."""
    function.__code__ = function.__code__.replace(co_filename=_INTERNAL)
    return function


hide_frames(_Builtin.__call__)


def find_origin(name: str, path: Sequence[str] | None = None) -> object:
    """Return where a module would be imported from by the usual finders; None if it would not be found."""
    if path is None and name in sys.builtin_module_names:
        return "built-in"
    if path is None and FrozenImporter.find_spec(name) is not None:
        return "frozen"
    try:
        found = _find_origin(name, path)
    except Exception as error:
        return type(error).__name__
    if found is not None and found.origin is not None:
        return found.origin
    return None if found is None else tuple(found.submodule_search_locations or ())


def _is_native(name: str) -> bool:
    """Whether a loaded module is a library in native code, and not of the standard library."""
    return not import_effects.is_stdlib(name) and str(_loaded_origin(sys.modules[name])).endswith(".so")


def _loaded_origin(module: object) -> object:
    return getattr(getattr(module, "__spec__", None), "origin", None)


def current_folder() -> str | None:
    """Return the working folder; None if it was removed."""
    try:
        return _getcwd()
    except OSError:
        return None


def file_state(path: str, *, is_folder: bool = False) -> tuple[int, ...] | None:
    """Return what changes when a file is written, or a folder on ``sys.path`` gets entries; None without one."""
    try:
        found = _stat(path)
    except (OSError, ValueError):
        return None
    if found.st_mode & 0o170000 == 0o40000 and not is_folder:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def random_state(modules: Mapping[str, Any]) -> object:
    """Return the state of the generator of the module random; None if that is not among ``modules``."""
    generator = getattr(modules.get("random"), "_inst", None)
    return None if generator is None else generator.getstate()


def logger_class(modules: Mapping[str, Any]) -> object:
    """Return the class of new loggers; None if logging is not among ``modules``."""
    logging: Any = modules.get("logging")
    return None if not hasattr(logging, "root") else logging.root.manager.loggerClass or logging.getLoggerClass()


def distribution_key(name: str) -> str:
    """Return the name of a distribution in the form in which two spellings of it are equal."""
    return name.lower().replace("-", "_").replace(".", "_")


def _decode(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)


def _snapshot_module(name: str, module: ModuleType, *, with_classes: bool) -> Iterable[Snapshot]:
    """Take snapshots of a module's functions and classes and, ``with_classes``, of the methods of its classes."""
    spaces: list[Mapping[str, Any]] = [module.__dict__]
    if with_classes:
        spaces += [vars(each) for each in module.__dict__.values() if type(each) is type and each.__module__ == name]
    skipped = _UNCOMPARED.get(name, ())
    for space in spaces:
        code = {kind for kind in set(map(type, space.values())) if kind in _CODE_KINDS or issubclass(kind, type)}
        keys = [key for key, value in space.items() if type(value) in code and key not in skipped] if code else []
        if len(keys) > 1:
            get = itemgetter(*keys)
            yield space, get, get(space)


def _changeable_lists(recorder: object = None) -> dict[str, list[Any]]:
    filters: list[Any] = getattr(sys.modules.get("warnings"), "filters", [])
    finders = [each for each in sys.meta_path if each is not recorder]
    return {FILTERS: list(filters), FINDERS: finders, PATH_HOOKS: list(sys.path_hooks)}
