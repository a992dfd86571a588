"""Computes hashes of what modules contain, which two processes can compare, inside an audit's interpreters.

Standard library only; loaded by its path. All interpreters have one seed of hashes, so equal values have equal hashes
and sets have one order. A value is read to its end, however deep. An integer counts as an address, which differs in
each process, only if there is an object at it. readers.py reads objects that have fields in native code; those that it
cannot read are listed as opaque.
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

    from tests.tools.preload_audit.readers import NativeReaders

_PYTHON_NAMES = frozenset({"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__"})
_PYTHON_NAMES |= {"__package__", "__path__", "__spec__", "__warningregistry__"}
_ATOM_TYPES = (str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), type(NotImplemented))
_SIMPLE_TYPES = frozenset(_ATOM_TYPES) - {int, str}
_MAPPING_TYPES = (dict, types.MappingProxyType)
_WRAPPER_TYPES = (staticmethod, classmethod, property)
_WRAPPED_NAMES = ("__func__", "fget", "fset", "fdel")
_CLASS_NAMES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__subclasshook__"})
_CLASS_NAMES |= {"__firstlineno__", "__static_attributes__"}
_ADDRESSES = range(1 << 32, 1 << 48)
_SHOWN_ADDRESS = re.compile(r"\b0x([0-9a-f]{6,12})\b")
_NAMED_TYPES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
AUDIT_MODULES = frozenset({"import_stack", "recorder", "process_state", "state", "probe", "environment", "readers"})
AUDIT_MODULES |= {"perturbations", "allowed_differences"}

ALIAS = "@"
"""Prefix of names of a class, function or module of another module: some modules bind these on first use."""


class StateHasher:
    """Hashes values for one snapshot.

    Attributes:
        opaque: by module and name: the kinds of objects that could not be read.
        generators: likewise: the kinds of random generators that were found.
    """

    def __init__(
        self,
        names: dict[str, frozenset[str]],
        attributes: dict[str, frozenset[str]],
        natives: NativeReaders,
        reseeded: Iterable[object] = (),
    ) -> None:
        """``names``, by module, and ``attributes``, by the module of a base class, are ignored.

        ``reseeded``: the generators that Python, numpy and torch share among all users, which each rank reseeds.
        """
        self._ignored_names, self._ignored_attributes, self._natives = names, attributes, natives
        self._reseeded = {id(each) for each in reseeded}
        self.opaque: dict[tuple[str, str], set[str]] = {}
        self.generators: dict[tuple[str, str], set[str]] = {}
        self._module = self._name = ""
        self._pid = os.getpid()
        self._defined_here = set[int]()  # ids of functions and classes to read; of all others only the names count
        self._open_ids: set[int] = set()  # ids of the values that are being read
        self._hashes: dict[int, int] = {}  # of values in no reference cycle: the same wherever they are needed
        self._cycle_hashes: dict[int, int] = {}  # of values in one: these depend on where it was entered
        self._is_in_cycle = False  # whether the value that is being read leads to one of the latter
        self._hashed_values: list[object] = []  # so that no two objects get one id
        self._spaces = {id(get_namespace(module)) for module in list(sys.modules.values())}
        self._addresses: frozenset[int] | None = None

    def hash_modules(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Hash the value of each name of these modules; aliases are marked with ``ALIAS``."""
        found = {}
        for name in sorted(names):
            space = get_namespace(sys.modules.get(name))
            values = {}
            ignored = self._ignored_names.get(name, frozenset())
            self._module = name
            self._cycle_hashes.clear()
            for key, value in sorted(space.items(), key=lambda item: str(item[0])):
                if key not in _PYTHON_NAMES and key not in ignored:
                    self._name = str(key)
                    self._is_in_cycle = False
                    own = type(value) is types.FunctionType or issubclass(type(value), type)
                    self._defined_here = {id(value)} if own and _find_definition(value) == (name, key) else set()
                    values[ALIAS * self._is_alias(value) + self._name] = self._hash_named(key, value)
            found[name] = values
        return found

    def hash_value(self, value: Any) -> int:
        kind = type(value)
        if kind in _SIMPLE_TYPES:
            return hash((kind.__name__, str(value) if kind is not bytes else value))
        if kind is int:
            return self._hash_integer(value)
        if kind is str:
            return hash(("str", _SHOWN_ADDRESS.sub(self._mask_address, value) if "0x" in value else value))
        if issubclass(kind, types.ModuleType):
            return hash(("module", str(get_namespace(value).get("__name__"))))
        key = id(value)
        has_definition = kind is types.FunctionType or issubclass(kind, type)
        is_only_named = has_definition and (key not in self._defined_here or key in self._open_ids)
        if is_only_named and (definition := _find_definition(value)) is not None:
            return hash(definition)
        if key in self._hashes:
            return self._hashes[key]
        if key in self._cycle_hashes:
            self._is_in_cycle = True
            return self._cycle_hashes[key]
        if key in self._open_ids:
            self._is_in_cycle = True
            return hash("cycle")
        outside, self._is_in_cycle = self._is_in_cycle, False
        self._open_ids.add(key)
        try:
            of = str(type.__getattribute__(kind, "__module__")), str(kind.__qualname__)
            result = hash((*of, self._read(value, kind)))
        finally:
            self._open_ids.discard(key)
        (self._cycle_hashes if self._is_in_cycle else self._hashes)[key] = result
        self._is_in_cycle |= outside
        self._hashed_values.append(value)
        return result

    def hash_values(self, values: Iterable[Any]) -> tuple[int, ...]:
        found = []
        for each in list(values):
            found.append(self.hash_value(each))
        return tuple(found)

    def _hash_integer(self, value: int) -> int:
        return hash("address") if value in _ADDRESSES and self._is_address(value) else hash(("int", value))

    def _mask_address(self, found: re.Match[str]) -> str:
        return "0x" if self._is_address(int(found[1], 16)) else found[0]

    def _is_address(self, address: int) -> bool:
        """Whether this is the id of an object, or the main thread's identifier."""
        if self._addresses is None:
            tracked = gc.get_objects()
            living = {id(each) for each in tracked}
            for each in tracked:
                try:
                    living.update(map(id, gc.get_referents(each)))
                except Exception:
                    pass
            living.add(sys.modules["_thread"].get_ident())
            self._addresses = frozenset(living)
        return address in self._addresses

    def _hash_named(self, name: object, value: Any) -> int:
        """Hash the value of a name or a key; a name with "pid" may have this process's own pid."""
        if type(value) is int and value == self._pid and type(name) is str and "pid" in name.lower():
            return hash("pid")
        return self.hash_value(value)

    def _read(self, value: Any, kind: type) -> object:
        if issubclass(kind, type):
            return self._read_class(value)
        if kind is types.FunctionType:
            if getattr(value, "__globals__", {}).get("__name__") in AUDIT_MODULES:
                return ""
            return self._read_function(value)
        if kind is types.CodeType:
            return self._read_code(value)
        if issubclass(kind, (list, tuple)):
            base = list if issubclass(kind, list) else tuple
            elements = base.__getitem__(value, slice(None))
            if all(issubclass(type(each), _NAMED_TYPES) for each in elements):  # if from a set, ordered by address
                return tuple(sorted(self.hash_values(elements))), self._read_attributes(value)
            return self.hash_values(elements), self._read_attributes(value)
        if issubclass(kind, (set, frozenset)):
            members = list((set if issubclass(kind, set) else frozenset).__iter__(value))
            return tuple(sorted(self.hash_values(sorted(members, key=_get_set_order)))), self._read_attributes(value)
        if issubclass(kind, _MAPPING_TYPES):
            if id(value) in self._spaces or ("__spec__" in value and "__builtins__" in value):  # from globals()
                return str(value.get("__name__"))
            extra = self.hash_value(value.default_factory) if hasattr(kind, "default_factory") else 0
            return self._read_mapping(value), extra, self._read_attributes(value)
        if type.__getattribute__(kind, "__module__") in AUDIT_MODULES or value is os.environ:
            return ""
        if value is getattr(os, "environb", None):
            return ""
        if kind.__module__ == "logging" and kind.__name__.endswith("Logger"):
            settings = value.name, value.level, value.disabled, value.propagate
            return settings, self.hash_values([*value.handlers, *value.filters])
        if kind.__module__ == "logging" and kind.__name__ == "Manager":  # has all loggers
            return value.disable, self.hash_value(value.loggerClass)
        native = self._natives.find_native_base(kind)
        if self._natives.is_harmless(kind):
            return ""
        if self._natives.is_generator(kind):
            if id(value) not in self._reseeded:
                self._add_kind(self.generators, kind)
            return ""
        if native is None:
            return self._read_attributes(value)
        parts = self._natives.read(value, native)
        if parts is None:
            self._add_kind(self.opaque, native)
            return ""
        return self.hash_values(parts), self._read_attributes(value)

    def _add_kind(self, where: dict[tuple[str, str], set[str]], kind: type) -> None:
        where.setdefault((self._module, self._name), set()).add(f"{kind.__module__}.{kind.__qualname__}")
        self._is_in_cycle = True  # so that it is read again, and noted, where another module keeps it

    def _read_class(self, value: type) -> object:
        name = type.__getattribute__(value, "__module__"), type.__getattribute__(value, "__qualname__")
        space = {key: each for key, each in type.__getattribute__(value, "__dict__").items() if key not in _CLASS_NAMES}
        for each in space.values():
            parts = (each, *(getattr(each, part, None) for part in _WRAPPED_NAMES if type(each) in _WRAPPER_TYPES))
            self._defined_here.update(id(part) for part in parts if part is not None)
        return str(name), self._read_mapping(self._remove_ignored(value, space))

    def _is_alias(self, value: Any) -> bool:
        kind = type(value)
        if kind is types.FunctionType or issubclass(kind, type):
            definition = _find_definition(value)
            return definition is not None and definition[0] != self._module
        return issubclass(kind, types.ModuleType)

    def _remove_ignored(self, kind: type, space: dict[str, Any]) -> dict[str, Any]:
        for base in kind.__mro__[:-1]:
            if ignored := self._ignored_attributes.get(str(base.__module__)):
                space = {key: value for key, value in space.items() if key not in ignored}
        return space

    def _read_function(self, value: Any) -> object:
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.hash_value(cell.cell_contents))
            except ValueError:  # empty
                cells.append(0)
        space = value.__globals__
        return (
            str(value.__module__),  # no hash of None, which is an address before Python 3.12
            value.__qualname__,
            self._read_code(value.__code__),
            tuple(cells),
            self.hash_value(value.__defaults__),
            self.hash_value(value.__kwdefaults__),
            self._read_mapping(value.__dict__),
            0 if id(space) in self._spaces or "__spec__" in space else self._hash_globals(space),
        )

    def _hash_globals(self, space: dict[str, Any]) -> int:
        """Hash the globals of a function that ``exec`` made, which no module has."""
        if id(space) in self._open_ids:
            self._is_in_cycle = True
            return 0
        self._open_ids.add(id(space))
        try:
            found = {key: each for key, each in space.items() if key not in _PYTHON_NAMES}
            return hash(self._read_mapping(found))
        finally:
            self._open_ids.discard(id(space))

    def _read_code(self, code: types.CodeType) -> object:
        constants = []
        for each in code.co_consts:
            constants.append(hash(self._read_code(each)) if isinstance(each, types.CodeType) else self.hash_value(each))
        return code.co_code, tuple(constants), code.co_names, code.co_varnames

    def _read_mapping(self, value: Any) -> object:
        # A subclass may have items() of its own.
        items = list(dict.items(value) if issubclass(type(value), dict) else value.items())
        keyed = []
        for key, each in items:
            keyed.append((self.hash_value(key), key, each))
        keyed.sort(key=lambda item: item[0])  # hashes in a cycle depend on where it is entered
        hashes = []
        for key_hash, key, each in keyed:
            hashes.append(hash((key_hash, self._hash_named(key, each))))
        return tuple(hashes)

    def _read_attributes(self, value: Any) -> object:
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
        space, slots = self._remove_ignored(type(value), space), self._remove_ignored(type(value), slots)
        return self._read_mapping(space), self._read_mapping(slots)


def _find_definition(value: Any) -> tuple[str, str] | None:
    """Find the module that defines a class or a function, and its name there; None if it is not there."""
    module, name = value.__module__, value.__qualname__
    if type(module) is not str or type(name) is not str:
        return None
    found: Any = get_namespace(sys.modules.get(module))
    for part in name.split("."):
        found = found.get(part) if isinstance(found, _MAPPING_TYPES) else None
        if found is value:
            return module, name
        if type(found) in _WRAPPER_TYPES:
            if any(getattr(found, each, None) is value for each in _WRAPPED_NAMES):
                return module, name
            return None
        found = type.__getattribute__(found, "__dict__") if isinstance(found, type) else None
    return None


def _get_set_order(value: Any) -> tuple[str, str]:
    """Sort key of a set's members that is the same in all processes, as far as there is one."""
    kind = type(value)
    if kind in _ATOM_TYPES:
        return kind.__name__, str(value)
    name = getattr(value, "__qualname__", "") if issubclass(kind, _NAMED_TYPES) else ""
    return kind.__qualname__, str(name)


def get_namespace(module: object) -> dict[str, Any]:
    """The content of a module, without its own ``__getattr__``: some import more on access."""
    try:
        space = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return space if isinstance(space, dict) else {}


_TORCH_SETTINGS = (
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "is_grad_enabled",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
)


def hash_shared_state(hasher: StateHasher, environ: Mapping[bytes, bytes]) -> dict[str, int]:
    """Hash the state that belongs to no module, by its name in findings."""
    found = {"$" + os.fsdecode(name): hasher.hash_value(value) for name, value in environ.items()}
    warnings = sys.modules.get("warnings")
    filters: Any = getattr(warnings, "filters", ())
    # Sorted: their order is that of the imports, and matters only if two libraries disagree about one warning.
    found["warnings.filters"] = hash(tuple(sorted(str(each) for each in filters)))
    found["sys.path"] = hash(tuple(sys.path))
    found["sys.meta_path"] = hash(tuple(getattr(each, "__name__", type(each).__name__) for each in sys.meta_path))
    torch = sys.modules.get("torch")
    if torch is not None:
        read = [getattr(torch, name) for name in _TORCH_SETTINGS if hasattr(torch, name)]
        found["torch's settings"] = hash(tuple(str(each()) for each in read))
    return found


def list_shared_generators() -> Iterator[object]:
    """The generators of Python, numpy and torch: each rank reseeds them (core/rank/rank_runner.py)."""
    random, mtrand, torch = (sys.modules.get(name) for name in ("random", "numpy.random.mtrand", "torch"))
    yield getattr(random, "_inst", None)
    yield getattr(mtrand, "_rand", None)
    yield getattr(getattr(mtrand, "_rand", None), "_bit_generator", None)
    yield getattr(torch, "default_generator", None)
