"""What modules keep, as numbers that two processes can compare: computed inside the interpreters of a trial.

Standard library only; run from its path. Both interpreters have one seed of hashes, so equal values have equal numbers
and sets one order. Addresses are never part of a number. What native code keeps inside its objects is not seen.
"""

from __future__ import annotations

import os
import re
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DEEP = 4  # objects in objects
_LONG = 5_000  # elements of one container
_OF_PYTHON = frozenset(("__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__"))
_OF_PYTHON |= {"__path__", "__spec__", "__warningregistry__"}
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented))
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)
_WRAPPED = (staticmethod, classmethod, types.MethodType)
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__subclasshook__"})

_ADDRESSES = range(1 << 44, 1 << 47)
"""What id() gives, and threading.get_ident()."""

_SHOWN = re.compile(" at 0x[0-9a-f]+")
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_OURS = frozenset({"import_stack", "findings", "surroundings", "state", "probe"})

_NAMED = {
    "weakref": ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),  # when what they had goes is nobody's choice
    "_weakrefset": ("WeakSet",),
    "ctypes": ("CDLL", "PyDLL"),  # an address
    "multiprocessing.process": ("AuthenticationString",),
    "multiprocess.process": ("AuthenticationString",),  # of random bytes, which forks of one process always share
}
"""Classes whose objects differ between any two processes, and in nothing that a program sees."""


ALIAS = "@"
"""Before a name of another module's class, function or module. Some modules bind these when they are first asked."""


class Reader:
    """Turns values into numbers; one for one dump."""

    def __init__(self, names: dict[str, frozenset[str]], attributes: dict[str, frozenset[str]]) -> None:
        """What is left out: names by module, and attributes by the module of a base class (excused.py)."""
        self._names, self._excused = names, attributes
        self._module = ""
        self._pid = os.getpid()
        self._path: set[int] = set()
        self._known: dict[tuple[int, int], int] = {}
        self._kept: list[object] = []  # so that no two objects get one id

    def modules(self, names: list[str]) -> dict[str, dict[str, int]]:
        """The number of each name of these modules, marked with ``ALIAS`` if it is another module's."""
        found = {}
        for name in sorted(names):
            space = namespace(sys.modules.get(name))
            values = {}
            excused = self._names.get(name, frozenset())
            self._module = name
            self._known.clear()  # a number within a circle depends on where that was entered
            self._kept.clear()
            for key, value in sorted(space.items(), key=_by_name):
                if key not in _OF_PYTHON and key not in excused:
                    values[ALIAS * self._is_alias(value) + key] = self._named(key, value, 0)
            found[name] = values
        return found

    def number(self, value: Any, deep: int) -> int:
        kind = type(value)
        if kind in _ATOMS:
            if kind is int and value in _ADDRESSES:
                return hash("address")
            if kind is str and " at 0x" in value:  # an object shown as Python does
                value = _SHOWN.sub("", value)
            return hash((kind.__name__, str(value) if kind is not bytes else value))
        if issubclass(kind, types.ModuleType):
            return hash(("module", str(value.__dict__.get("__name__"))))
        if deep > _DEEP:
            return hash(kind.__qualname__)
        key = (id(value), deep)
        if key in self._known:
            return self._known[key]
        if id(value) in self._path:
            return hash("cycle")
        self._path.add(id(value))
        try:
            number = hash((str(kind.__module__), kind.__qualname__, self._inside(value, kind, deep + 1)))
        except RecursionError:
            raise
        except Exception as error:  # a property, a proxy, a class that forbids it
            number = hash(("unreadable", type(error).__name__))
        finally:
            self._path.discard(id(value))
        self._known[key] = number
        self._kept.append(value)
        return number

    def _named(self, name: object, value: Any, deep: int) -> int:
        """The number of what bears this name: where that is the pid of this very process it is as it should be."""
        if type(value) is int and value == self._pid and type(name) is str and "pid" in name.lower():
            return hash("pid")
        return self.number(value, deep)

    def _inside(self, value: Any, kind: type, deep: int) -> object:
        if issubclass(kind, type):
            return self._class(value, deep)
        if kind is types.FunctionType:
            if value.__module__ in _OURS:
                return ""
            if self._elsewhere(value.__module__, value.__qualname__):
                return value.__module__, value.__qualname__
            return self._function(value, deep)
        if issubclass(kind, _SEQUENCES):
            base = list if issubclass(kind, list) else tuple
            elements = base.__getitem__(value, slice(_LONG))
            if all(issubclass(type(each), _CODE) for each in elements):  # of a set, whose order is one of addresses
                return tuple(sorted(self.number(each, deep) for each in elements))
            return base.__len__(value), *(self.number(each, deep) for each in elements), self._attributes(value, deep)
        if issubclass(kind, _SETS):
            members = (set if issubclass(kind, set) else frozenset).__iter__(value)
            return tuple(sorted(self.number(each, deep) for each in members))
        if issubclass(kind, _MAPPINGS):
            if "__spec__" in value and "__builtins__" in value:  # what globals() gave
                return str(value.get("__name__"))
            return self._mapping(value, deep), self._attributes(value, deep)
        if kind in _WRAPPED:
            return self.number(value.__func__, deep), (
                self.number(value.__self__, deep) if kind is types.MethodType else 0
            )
        if kind is property:
            return tuple(self.number(each, deep) for each in (value.fget, value.fset, value.fdel))
        if kind.__module__ in _OURS or value is os.environ or value is getattr(os, "environb", None):
            return ""
        if kind.__module__ == "logging" and kind.__name__.endswith("Logger"):
            return value.name, value.level, value.disabled, value.propagate, len(value.handlers), len(value.filters)
        if kind.__name__ in _NAMED.get(kind.__module__, ()):
            return ""
        if kind.__module__ == "functools" and kind.__name__ == "partial":
            return tuple(self.number(each, deep) for each in (value.func, value.args, value.keywords))
        if kind.__module__ == "re" and kind.__name__ == "Pattern":
            return value.pattern, value.flags
        if kind.__module__ == "datetime" or issubclass(kind, os.PathLike):
            return str(value)
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
            return str(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not getattr(value.dtype, "hasobject", True):
            if value.dtype.char in "gG":  # a long double has bytes that nobody sets
                return str(value.dtype), str(value.tolist())
            return str(value.dtype), value.shape, value.tobytes() if value.nbytes < 1 << 20 else 0
        if issubclass(kind, _ATOMS):  # a class of its own: an enumeration's member, a marked string
            return _atom(value), self._attributes(value, deep)
        return self._attributes(value, deep)

    def _class(self, value: type, deep: int) -> object:
        name = type.__getattribute__(value, "__module__"), type.__getattribute__(value, "__qualname__")
        if self._elsewhere(*name):
            return name
        space = {key: each for key, each in type.__getattribute__(value, "__dict__").items() if key not in _OF_CLASSES}
        return name, self._mapping(self._leave_out(value, space), deep)

    def _elsewhere(self, module: object, name: str) -> bool:
        """Whether that is looked at as another module's own."""
        return module != self._module and module in sys.modules and "<locals>" not in name

    def _is_alias(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType:
            return self._elsewhere(value.__module__, value.__qualname__)
        if issubclass(kind, type):
            names = type.__getattribute__(value, "__module__"), type.__getattribute__(value, "__qualname__")
            return self._elsewhere(*names)
        return issubclass(kind, types.ModuleType)

    def _leave_out(self, kind: type, space: dict[str, Any]) -> dict[str, Any]:
        for base in kind.__mro__[:-1]:
            if excused := self._excused.get(base.__module__):
                space = {key: value for key, value in space.items() if key not in excused}
        return space

    def _function(self, value: Any, deep: int) -> object:
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.number(cell.cell_contents, deep))
            except ValueError:  # empty
                cells.append(0)
        return (
            str(value.__module__),  # no hash of None, which is an address before Python 3.12
            value.__qualname__,
            value.__code__.co_code,
            tuple(cells),
            self.number(value.__defaults__, deep),
            self.number(value.__kwdefaults__, deep),
            self._mapping(value.__dict__, deep),
        )

    def _mapping(self, value: Any, deep: int) -> object:
        items = list(dict.items(value) if issubclass(type(value), dict) else value.items())  # no method of a subclass
        numbers = [hash((self.number(key, deep), self._named(key, each, deep))) for key, each in items[:_LONG]]
        return (len(items), *sorted(numbers))

    def _attributes(self, value: Any, deep: int) -> object:
        try:
            space = object.__getattribute__(value, "__dict__")
        except AttributeError:
            space = {}
        slots = {}
        for base in type(value).__mro__[:-1]:
            named = base.__dict__.get("__slots__", ())
            for name in (named,) if isinstance(named, str) else named:
                described = base.__dict__.get(name)
                if isinstance(described, types.MemberDescriptorType):
                    try:
                        slots[name] = described.__get__(value)
                    except AttributeError:
                        pass
        return self._mapping(self._leave_out(type(value), space), deep), self._mapping(slots, deep)


def _by_name(item: tuple[object, object]) -> str:
    return str(item[0])


def namespace(module: object) -> dict[str, Any]:
    """What a module has, without asking it: some import more as soon as they are asked."""
    try:
        space = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return space if type(space) is dict else {}


def _atom(value: Any) -> object:
    for kind in _ATOMS[:6]:
        if issubclass(type(value), kind):
            return str(kind.__str__(value)) if kind is not bytes else bytes(value)
    return ""


_OF_TORCH = (
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "is_grad_enabled",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
)


def shared() -> dict[str, int]:
    """The number of what belongs to no module, by words for it."""
    reader = Reader({}, {})
    environ: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    found = {"$" + os.fsdecode(name): reader.number(value, 0) for name, value in environ.items()}
    warnings = sys.modules.get("warnings")
    filters: Any = getattr(warnings, "filters", ())
    # Their order is that of the imports, and matters only where two libraries are at odds about one warning.
    found["warnings.filters"] = hash(tuple(sorted(str(each) for each in filters)))
    found["sys.path"] = hash(tuple(sys.path))
    found["sys.meta_path"] = hash(tuple(getattr(each, "__name__", type(each).__name__) for each in sys.meta_path))
    torch = sys.modules.get("torch")
    if torch is not None:
        read = [getattr(torch, name) for name in _OF_TORCH if hasattr(torch, name)]
        found["torch's settings"] = hash(tuple(str(each()) for each in read))
    return found
