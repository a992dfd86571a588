"""Reads the content of native objects as parts for state.py, inside an audit's interpreters.

Standard library only; loaded by its path. An object with neither a reader nor an entry in HARMLESS is opaque: a module
that keeps one is refused.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import types
import warnings
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Read = Callable[[Any], "Iterable[Any]"]

_DEALLOC_OFFSET = 6 * ctypes.sizeof(ctypes.c_void_p)  # of tp_dealloc in a PyTypeObject


def get_full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class NativeReaders:
    """Finds the classes that have fields in native code, and reads their objects."""

    def __init__(self) -> None:
        self._patterns = re.compile("|".join(PATTERNS))
        self._bases: dict[type, type | None] = {object: None}
        self._generators: dict[type, bool] = {}
        self._python_deallocator = _get_deallocator(NativeReaders)

    def find_native_base(self, kind: type) -> type | None:
        """The first base that is not written in Python; None if objects have no fields but their attributes."""
        if kind not in self._bases:
            found = next((each for each in kind.__mro__ if self.is_native(each)), None)
            self._bases[kind] = None if found is object else found
        return self._bases[kind]

    def is_generator(self, kind: type) -> bool:
        """Whether its objects draw random numbers; SystemRandom's, which have no state, do not."""
        if kind not in self._generators:
            names = set(map(get_full_name, kind.__mro__))
            self._generators[kind] = not names.isdisjoint(GENERATORS) and "random.SystemRandom" not in names
        return self._generators[kind]

    def is_harmless(self, kind: type) -> bool:
        return get_full_name(kind) in HARMLESS

    def is_native(self, kind: type) -> bool:
        """Whether a class was made by native code: all classes of Python code have the same deallocator."""
        return _get_deallocator(kind) != self._python_deallocator

    def read(self, value: Any, kind: type) -> list[Any] | None:
        """Read the fields that ``value`` has as a ``kind``; None if they cannot be read."""
        name = get_full_name(kind)
        if name in HARMLESS or self._patterns.fullmatch(name):
            return []
        readers = (_READERS.get(get_full_name(each)) for each in kind.__mro__[:-1])
        reader = next((each for each in readers if each is not None), _read_reduced)
        try:
            return list(reader(value))
        except Exception:
            return None


def _read_reduced(value: Any) -> list[Any]:
    """Read what pickle would store; raises an error if fields in native code cannot be pickled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = value.__reduce_ex__(4)
    if isinstance(found, str):
        return [found]
    return [*found[:3], *(list(each) for each in found[3:5] if each is not None)]


def _get_deallocator(kind: type) -> int | None:
    return ctypes.c_void_p.from_address(id(kind) + _DEALLOC_OFFSET).value


GENERATORS = frozenset(
    {
        "_random.Random",
        "numpy.random._generator.Generator",
        "numpy.random.mtrand.RandomState",
        "numpy.random.bit_generator.BitGenerator",
        "numpy.random.bit_generator.SeedSequence",
        "torch._C.Generator",
    }
)
"""Kinds of random generators."""


def _read_lru_cache(value: Any) -> list[Any]:
    if str(getattr(value, "__module__", "")).partition(".")[0] in sys.stdlib_module_names:
        return [value.__qualname__]  # not its content, which any module may add to
    held = [each for each in gc.get_referents(value) if not isinstance(each, type)]
    held = [each for each in held if type(each).__name__ != "_lru_list_elem"]
    caches = [each for each in held if type(each) is dict]
    bounded = any("_lru_list_elem" in type(each).__name__ for cache in caches for each in cache.values())
    shown = [_remove_links(each) if type(each) is dict else each for each in held]
    return [bounded, value.cache_info()[2:], {n: each for n, each in enumerate(shown) if type(each) is not object}]


def _remove_links(cache: dict[Any, Any]) -> dict[Any, Any]:
    return {key: None if type(each).__name__ == "_lru_list_elem" else each for key, each in cache.items()}


def _read_context_variable(value: Any) -> list[Any]:
    return [value.name, value.get(None), [each for each in gc.get_referents(value) if type(each) is not type]]


def _read_frame(frame: Any) -> list[Any]:
    if frame is None:
        return []
    own = frame.f_locals is not frame.f_globals
    return [frame.f_code, frame.f_lasti, dict(frame.f_locals) if own else None]


def _drain_queue(value: Any) -> list[Any]:
    return [value.get_nowait() for _ in range(value.qsize())]


def _read_lock(value: Any) -> list[Any]:
    return [value.locked()] if hasattr(value, "locked") else [value._is_owned()]


def _read_file(value: Any) -> list[Any]:
    name = "closed" if value.closed else value.name
    return [name] if name in ("<stdin>", "<stdout>", "<stderr>", 0, 1, 2, "closed") else [name, value.mode]


def _read_array(value: Any) -> list[Any]:
    array: Any = sys.modules["numpy"].ndarray
    if value.dtype.hasobject:
        return [str(value.dtype), value.shape, array.tolist(value)]
    if value.dtype.char in "gG":  # a long double has bytes that are never set
        return [str(value.dtype), str(array.tolist(value))]
    return [str(value.dtype), value.shape, array.tobytes(value)]


def _read_scalar(value: Any) -> list[Any]:
    return [str(value.dtype), repr(value) if value.dtype.char in "gG" else value.tobytes()]


def _read_tensor(value: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    about = [str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad, value.grad]
    if value.device.type == "meta" or value.is_sparse or value.is_quantized:
        return [*about, repr(value) if value.device.type != "meta" else ""]
    return [
        *about,
        value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"",
    ]


def _read_exception(value: Any) -> list[Any]:
    return [value.args, value.__cause__, value.__context__, value.__traceback__]


def _read_cython_function(value: Any) -> list[Any]:
    return [getattr(value, "__module__", ""), value.__qualname__, value.__defaults__, value.__kwdefaults__]


def _make_reader(*names: str) -> Read:
    return lambda value: [getattr(value, name) for name in names]


def _read_repr(value: Any) -> list[Any]:
    return [re.sub(" at 0x[0-9a-f]+", "", repr(value))]


def _read_builtin(value: Any) -> list[Any]:
    own = value.__self__
    return [value.__qualname__, own.__name__ if isinstance(own, types.ModuleType) else own]


def _read_descriptor(value: Any) -> list[Any]:
    return [value.__objclass__, value.__name__]


def _read_nothing(value: Any) -> list[Any]:
    return []


def _read_atom(value: Any) -> list[Any]:
    kind: Any
    for kind in (str, bytes, bytearray, int, float, complex):
        if isinstance(value, kind):
            return [bytes(value) if kind is bytes else kind.__str__(value)]
    return []


def _read_weakref(value: Any) -> list[Any]:
    return [value()]


def _map_names(names: str, reader: Read, module: str = "builtins") -> dict[str, Read]:
    return {f"{module}.{name}": reader for name in names.split()}


_READERS: dict[str, Read] = {
    **_map_names("str bytes bytearray int float complex", _read_atom),
    **_map_names("dict_keys dict_values dict_items", list),
    **_map_names("staticmethod classmethod instancemethod", _make_reader("__func__")),
    **_map_names("getset_descriptor member_descriptor wrapper_descriptor method_descriptor", _read_descriptor),
    **_map_names("classmethod_descriptor", _read_descriptor),
    **_map_names("weakref", _read_weakref),
    **_map_names("object weakproxy", _read_nothing),
    **_map_names("PyCapsule", _read_repr),
    "builtins.generator": lambda value: [_read_frame(value.gi_frame), value.gi_yieldfrom],
    "builtins.coroutine": lambda value: [_read_frame(value.cr_frame), value.cr_await],
    "builtins.async_generator": lambda value: [_read_frame(value.ag_frame), value.ag_await],
    "builtins.frame": _read_frame,
    "builtins.traceback": _make_reader("tb_lineno", "tb_frame", "tb_next"),
    "builtins.cell": _make_reader("cell_contents"),
    "builtins.memoryview": lambda value: [value.format, value.shape, value.tobytes()],
    "builtins.property": _make_reader("fget", "fset", "fdel"),
    "builtins.method": _make_reader("__func__", "__self__"),
    "builtins.super": _make_reader("__thisclass__", "__self__"),
    "builtins.builtin_function_or_method": _read_builtin,
    "builtins.method-wrapper": _make_reader("__self__", "__name__"),
    "builtins.BaseException": _read_exception,
    "weakref.ReferenceType": _read_weakref,
    **_map_names("ProxyType CallableProxyType", _read_nothing, "weakref"),
    "types.UnionType": _make_reader("__args__"),
    "typing.Union": _make_reader("__args__"),
    "typing.TypeVar": _make_reader("__name__", "__bound__", "__constraints__"),
    "typing.ParamSpec": _make_reader("__name__", "__bound__"),
    **_map_names("TypeVarTuple TypeAliasType", _make_reader("__name__"), "typing"),
    "functools._lru_cache_wrapper": _read_lru_cache,
    "functools.KeyWrapper": _make_reader("obj"),
    "_thread._local": lambda value: [_local.__getattribute__(value, "__dict__")],
    **_map_names("lock LockType RLock", _read_lock, "_thread"),
    "_contextvars.ContextVar": _read_context_variable,
    "_contextvars.Context": lambda value: [dict(value.items())],
    **_map_names("TextIOWrapper BufferedReader BufferedWriter BufferedRandom FileIO", _read_file, "_io"),
    "_queue.SimpleQueue": _drain_queue,
    "_struct.Struct": _make_reader("format", "size"),
    **_map_names("Scanner Encoder make_scanner make_encoder", lambda value: list(gc.get_referents(value)), "_json"),
    **_map_names("Scanner Encoder", lambda value: list(gc.get_referents(value)), "simplejson._speedups"),
    "_csv.Dialect": _make_reader("delimiter", "quotechar", "escapechar", "lineterminator", "quoting"),
    "_elementtree.Element": lambda value: [value.tag, dict(value.attrib), value.text, value.tail, list(value)],
    "_hashlib.HASH": lambda value: [value.name, value.hexdigest()],
    "_ssl._SSLContext": _make_reader("protocol", "options", "verify_mode", "check_hostname"),
    "_ctypes._SimpleCData": _make_reader("value"),
    **_map_names("Structure Union Array", lambda value: [bytes(value)], "_ctypes"),
    "_ctypes.CFuncPtr": lambda value: [value.argtypes, value.restype],
    "_pickle.Pickler": _read_nothing,
    "re.Pattern": _make_reader("pattern", "flags"),
    "_regex.Pattern": _make_reader("pattern", "flags"),
    "re.Match": _make_reader("re", "string", "pos", "endpos", "regs"),
    "_cython_function": _read_cython_function,
    "numpy.ndarray": _read_array,
    "numpy.generic": _read_scalar,
    "numpy.ufunc": _make_reader("__name__"),
    **_map_names("TensorBase _TensorBase", _read_tensor, "torch._C"),
    **_map_names("dtype device layout memory_format", _read_repr, "torch"),
}
"""By the kind's full name."""

HARMLESS: frozenset[str] = frozenset(
    {
        # Python's own: tables of functions, made once and never written to.
        "_abc._abc_data",
        "_thread._localdummy",
        "unicodedata.UCD",
        "random.SystemRandom",
        # Names of temporary files: begins anew where it finds itself in another process.
        "tempfile._RandomNameSequence",
        # Random bytes with which processes of one program know each other: forks of one process share them.
        "multiprocessing.process.AuthenticationString",
        "multiprocess.process.AuthenticationString",
        # A library and its functions, at addresses.
        "_ctypes.CType_Type",
        "_ctypes.CField",
        "_cffi_backend.FFI",
        "_cffi_backend.Lib",
        "_cffi_backend.CType",
        "_cffi_backend.__FFIGlobSupport",
        # Functions of Fortran and of scipy's dispatch, which tables of native code name.
        "builtins.fortran",
        "uarray._Function",
        # Takes pyarrow's types out of its registry at the end.
        "pyarrow.lib._ExtensionRegistryNanny",
        # Types of messages by name: modules add their own, and none is ever removed.
        "google._upb._message.DescriptorPool",
        # What a library adds to torch's operators: functions by their names, which no other can take away.
        "torch._C._DispatchModule",
        "torch._C._DispatchOperatorHandle",
        "torch._C._PyObjectDispatchFunc",
        "torch._C._PyObjectRedispatchFunc",
        # Numpy's functions, and its wrappers of them.
        "numpy._ArrayFunctionDispatcher",
        "numpy._core._multiarray_umath._ArrayFunctionDispatcher",
    }
)
"""Kinds of native objects without state of a process, by full name: each was looked at."""

PATTERNS = (
    # Functions that Cython, pybind11 and nanobind have made, and their kinds of properties.
    r"_cython_[\w.]+\.\w*cython_function_or_method",
    r"[\w.]*\bcython_function_or_method|[\w.]*\bfused_cython_function",
    r"pybind11_builtins\.\w+|builtins\.pybind11_detail_function_record_\w+|nanobind\.nb_\w+",
    # Types of messages, made of texts in the source, never written to.
    r"google\._upb\._message\.\w*Descriptor",
    # Markers of kinds: enumerations of native code are values.
    r"torch\._C\._?\w*(Type|Kind|Mode|Op|Key|Tag)s?",
)
"""More of them, by patterns of full names."""
