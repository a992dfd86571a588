"""Computes the state of modules as numbers that two processes can compare, inside an audit's interpreters.

Standard library only; run from its path. All interpreters have one seed of hashes, so equal values have equal numbers
and sets one order. A value is read to its end, however deep; an address counts as none only if an object lives there.
What has fields in native code is read by readers.py; what that cannot read is noted as opaque.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from tests.preload_audit.readers import Natives

_OF_PYTHON = frozenset(("__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__"))
_OF_PYTHON |= {"__path__", "__spec__", "__warningregistry__"}
_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented))
_SIMPLE = frozenset(_ATOMS) - {int, str}
_MAPPINGS = (dict, types.MappingProxyType)
_WRAPPERS = (staticmethod, classmethod, property)
_PARTS = ("__func__", "fget", "fset", "fdel")
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__subclasshook__"})
_OF_CLASSES |= {"__firstlineno__", "__static_attributes__"}
_ADDRESSES = range(1 << 32, 1 << 48)
_SHOWN = re.compile(r"\b0x([0-9a-f]{6,12})\b")
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
AUDIT_MODULES = frozenset({"import_stack", "recorder", "process_state", "state", "probe", "environment", "readers"})
AUDIT_MODULES |= {"perturbations", "allowed_differences"}

ALIAS = "@"
"""Before a name of another module's class, function or module. Some modules bind these when they are first asked."""


class Reader:
    """Turns values into numbers; one for one snapshot.

    Attributes:
        opaque: the kinds of objects that could not be read, by module and name.
        generators: the random generators that were found, likewise.
    """

    def __init__(
        self,
        names: dict[str, frozenset[str]],
        attributes: dict[str, frozenset[str]],
        natives: Natives,
        spared: Iterable[object] = (),
    ) -> None:
        """What is left out: names by module, and attributes by the module of a base class (allowed_differences.py).

        ``spared``: the generators that Python, numpy and torch share among all users, which each rank seeds anew.
        """
        self._names, self._excused, self._natives = names, attributes, natives
        self._spared = {id(each) for each in spared}
        self.opaque: dict[tuple[str, str], set[str]] = {}
        self.generators: dict[tuple[str, str], set[str]] = {}
        self._module = self._name = ""
        self._pid = os.getpid()
        self._own = set[int]()  # functions and classes that are read here, where others only name them
        self._path: set[int] = set()
        self._whole: dict[int, int] = {}  # numbers of what is in no circle: the same wherever they are needed
        self._inside: dict[int, int] = {}  # of what is: they depend on where the circle was entered
        self._partial = False  # whether what is being read leads to one of the latter
        self._kept: list[object] = []  # so that no two objects get one id
        self._spaces = {id(namespace(module)) for module in list(sys.modules.values())}
        self._living: frozenset[int] | None = None

    def modules(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """The number of each name of these modules, marked with ``ALIAS`` if it is another module's."""
        found = {}
        for name in sorted(names):
            space = namespace(sys.modules.get(name))
            values = {}
            excused = self._names.get(name, frozenset())
            self._module = name
            self._inside.clear()
            for key, value in sorted(space.items(), key=_by_name):
                if key not in _OF_PYTHON and key not in excused:
                    self._name = str(key)
                    self._partial = False
                    own = type(value) is types.FunctionType or issubclass(type(value), type)
                    self._own = {id(value)} if own and _place(value) == (name, key) else set()
                    values[ALIAS * self._is_alias(value) + self._name] = self._named(key, value)
            found[name] = values
        return found

    def number(self, value: Any) -> int:
        kind = type(value)
        if kind in _SIMPLE:
            return hash((kind.__name__, str(value) if kind is not bytes else value))
        if kind is int:
            return self._integer(value)
        if kind is str:
            return hash(("str", _SHOWN.sub(self._shown, value) if "0x" in value else value))
        if issubclass(kind, types.ModuleType):
            return hash(("module", str(namespace(value).get("__name__"))))
        key = id(value)
        if (kind is types.FunctionType or issubclass(kind, type)) and (key not in self._own or key in self._path):
            place = _place(value)
            if place is not None:
                return hash(place)
        if key in self._whole:
            return self._whole[key]
        if key in self._inside:
            self._partial = True
            return self._inside[key]
        if key in self._path:
            self._partial = True
            return hash("circle")
        outside, self._partial = self._partial, False
        self._path.add(key)
        try:
            of = str(type.__getattribute__(kind, "__module__")), str(kind.__qualname__)
            number = hash((*of, self._read(value, kind)))
        finally:
            self._path.discard(key)
        (self._inside if self._partial else self._whole)[key] = number
        self._partial |= outside
        self._kept.append(value)
        return number

    def numbers(self, values: Iterable[Any]) -> tuple[int, ...]:
        found = []
        for each in list(values):
            found.append(self.number(each))
        return tuple(found)

    def _integer(self, value: int) -> int:
        return hash("address") if value in _ADDRESSES and self._lives(value) else hash(("int", value))

    def _shown(self, found: re.Match[str]) -> str:
        return "0x" if self._lives(int(found[1], 16)) else found[0]

    def _lives(self, address: int) -> bool:
        """Whether this is what id() gives for an object that is there, or what the main thread is known by."""
        if self._living is None:
            tracked = gc.get_objects()
            living = {id(each) for each in tracked}
            for each in tracked:
                try:
                    living.update(map(id, gc.get_referents(each)))
                except Exception:
                    pass
            living.add(sys.modules["_thread"].get_ident())
            self._living = frozenset(living)
        return address in self._living

    def _named(self, name: object, value: Any) -> int:
        """The number of what bears this name: where that is the pid of this very process it is as it should be."""
        if type(value) is int and value == self._pid and type(name) is str and "pid" in name.lower():
            return hash("pid")
        return self.number(value)

    def _read(self, value: Any, kind: type) -> object:
        if issubclass(kind, type):
            return self._class(value)
        if kind is types.FunctionType:
            if getattr(value, "__globals__", {}).get("__name__") in AUDIT_MODULES:
                return ""
            return self._function(value)
        if kind is types.CodeType:
            return self._code(value)
        if issubclass(kind, (list, tuple)):
            base = list if issubclass(kind, list) else tuple
            elements = base.__getitem__(value, slice(None))
            if all(issubclass(type(each), _CODE) for each in elements):  # of a set, whose order is one of addresses
                return tuple(sorted(self.numbers(elements))), self._attributes(value)
            return self.numbers(elements), self._attributes(value)
        if issubclass(kind, (set, frozenset)):
            members = list((set if issubclass(kind, set) else frozenset).__iter__(value))
            return tuple(sorted(self.numbers(sorted(members, key=_outside)))), self._attributes(value)
        if issubclass(kind, _MAPPINGS):
            if id(value) in self._spaces or ("__spec__" in value and "__builtins__" in value):  # what globals() gave
                return str(value.get("__name__"))
            extra = self.number(value.default_factory) if hasattr(kind, "default_factory") else 0
            return self._mapping(value), extra, self._attributes(value)
        if type.__getattribute__(kind, "__module__") in AUDIT_MODULES or value is os.environ:
            return ""
        if value is getattr(os, "environb", None):
            return ""
        if kind.__module__ == "logging" and kind.__name__.endswith("Logger"):
            settings = value.name, value.level, value.disabled, value.propagate
            return settings, self.numbers([*value.handlers, *value.filters])
        if kind.__module__ == "logging" and kind.__name__ == "Manager":  # which has all loggers there are
            return value.disable, self.number(value.loggerClass)
        native = self._natives.base(kind)
        if self._natives.is_harmless(kind):
            return ""
        if self._natives.is_generator(kind):
            if id(value) not in self._spared:
                self._note(self.generators, kind)
            return ""
        if native is None:
            return self._attributes(value)
        parts = self._natives.read(value, native)
        if parts is None:
            self._note(self.opaque, native)
            return ""
        return self.numbers(parts), self._attributes(value)

    def _note(self, where: dict[tuple[str, str], set[str]], kind: type) -> None:
        where.setdefault((self._module, self._name), set()).add(f"{kind.__module__}.{kind.__qualname__}")
        self._partial = True  # any other that keeps it must be noted too

    def _class(self, value: type) -> object:
        name = type.__getattribute__(value, "__module__"), type.__getattribute__(value, "__qualname__")
        space = {key: each for key, each in type.__getattribute__(value, "__dict__").items() if key not in _OF_CLASSES}
        for each in space.values():
            parts = (each, *(getattr(each, part, None) for part in _PARTS if type(each) in _WRAPPERS))
            self._own.update(id(part) for part in parts if part is not None)
        return str(name), self._mapping(self._leave_out(value, space))

    def _is_alias(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType or issubclass(kind, type):
            place = _place(value)
            return place is not None and place[0] != self._module
        return issubclass(kind, types.ModuleType)

    def _leave_out(self, kind: type, space: dict[str, Any]) -> dict[str, Any]:
        for base in kind.__mro__[:-1]:
            if excused := self._excused.get(str(base.__module__)):
                space = {key: value for key, value in space.items() if key not in excused}
        return space

    def _function(self, value: Any) -> object:
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.number(cell.cell_contents))
            except ValueError:  # empty
                cells.append(0)
        space = value.__globals__
        return (
            str(value.__module__),  # no hash of None, which is an address before Python 3.12
            value.__qualname__,
            self._code(value.__code__),
            tuple(cells),
            self.number(value.__defaults__),
            self.number(value.__kwdefaults__),
            self._mapping(value.__dict__),
            0 if id(space) in self._spaces or "__spec__" in space else self._globals(space),
        )

    def _globals(self, space: dict[str, Any]) -> int:
        """Those of code that was made by ``exec``, which no module has."""
        if id(space) in self._path:
            self._partial = True
            return 0
        self._path.add(id(space))
        try:
            found = {key: each for key, each in space.items() if key not in _OF_PYTHON}
            return hash(self._mapping(found))
        finally:
            self._path.discard(id(space))

    def _code(self, code: types.CodeType) -> object:
        constants = []
        for each in code.co_consts:
            constants.append(hash(self._code(each)) if isinstance(each, types.CodeType) else self.number(each))
        return code.co_code, tuple(constants), code.co_names, code.co_varnames

    def _mapping(self, value: Any) -> object:
        items = list(dict.items(value) if issubclass(type(value), dict) else value.items())  # no method of a subclass
        keyed = []
        for key, each in items:
            keyed.append((self.number(key), key, each))
        keyed.sort(key=_first)  # what is in a circle depends on where that is entered
        numbers = []
        for number, key, each in keyed:
            numbers.append(hash((number, self._named(key, each))))
        return tuple(numbers)

    def _attributes(self, value: Any) -> object:
        try:
            space = object.__getattribute__(value, "__dict__")
        except AttributeError:
            space = {}
        if not isinstance(space, dict):
            space = {}
        slots = {}
        for base in type(value).__mro__[:-1]:
            if self._natives.is_native(base):
                continue
            for name, described in type.__getattribute__(base, "__dict__").items():
                if isinstance(described, types.MemberDescriptorType) and not name.startswith("__"):
                    try:
                        slots[name] = described.__get__(value)
                    except Exception:  # not set
                        pass
        return self._mapping(self._leave_out(type(value), space)), self._mapping(self._leave_out(type(value), slots))


def _place(value: Any) -> tuple[str, str] | None:
    """The module that has a class or a function, and its name there; None if it is not found there."""
    module, name = value.__module__, value.__qualname__
    if type(module) is not str or type(name) is not str:
        return None
    found: Any = namespace(sys.modules.get(module))
    for part in name.split("."):
        found = found.get(part) if isinstance(found, _MAPPINGS) else None
        if found is value:
            return module, name
        if type(found) in _WRAPPERS:
            if any(getattr(found, each, None) is value for each in _PARTS):
                return module, name
            return None
        found = type.__getattribute__(found, "__dict__") if isinstance(found, type) else None
    return None


def _by_name(item: tuple[object, object]) -> str:
    return str(item[0])


def _first(item: tuple[int, object, object]) -> int:
    return item[0]


def _outside(value: Any) -> tuple[str, str]:
    """In what order to read a set's members, as far as they show it themselves."""
    kind = type(value)
    if kind in _ATOMS:
        return kind.__name__, str(value)
    name = getattr(value, "__qualname__", "") if issubclass(kind, _CODE) else ""
    return kind.__qualname__, str(name)


def namespace(module: object) -> dict[str, Any]:
    """What a module has, without asking it: some import more as soon as they are asked."""
    try:
        space = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return space if isinstance(space, dict) else {}


_OF_TORCH = (
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "is_grad_enabled",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
)


def shared_state(reader: Reader, environ: Mapping[bytes, bytes]) -> dict[str, int]:
    """The number of each, by words for it."""
    found = {"$" + os.fsdecode(name): reader.number(value) for name, value in environ.items()}
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


def shared_generators() -> Iterator[object]:
    """Those of Python, numpy and torch themselves: each rank seeds them anew (core/rank/rank_runner.py)."""
    random, mtrand, torch = (sys.modules.get(name) for name in ("random", "numpy.random.mtrand", "torch"))
    yield getattr(random, "_inst", None)
    yield getattr(mtrand, "_rand", None)
    yield getattr(getattr(mtrand, "_rand", None), "_bit_generator", None)
    yield getattr(torch, "default_generator", None)
