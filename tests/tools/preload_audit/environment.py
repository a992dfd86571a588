"""Traces reads of the environment, the arguments and ``__main__``, inside an audit's interpreters.

Standard library only; loaded by its path. What native code reads is recorded by ``getenv_tracer.c``, which is loaded
before the C library (LD_PRELOAD).
"""

from __future__ import annotations

import ctypes
import operator
import os
import posix
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    OnRead = Callable[[object], None]
    Record = Callable[[str], None]


def trace_environment(on_read: OnRead, record: Record) -> None:
    """Call ``on_read`` with each variable that is read by its name, and ``record`` for reads of all."""
    for name in ("environ", "environb"):
        environ: Any = getattr(os, name)
        variables = environ.__dict__.pop("_data")
        environ.__dict__.update(_variables=variables, _on_read=on_read, _record=record, _shown=f"os.{name}")
        environ.__class__ = _make_traced_class(type(environ))
    posix.environ = _TracedObject(record, "posix.environ", posix.environ)  # type: ignore[assignment]


def get_variables() -> dict[bytes, bytes]:
    """The variables themselves, read without a record."""
    found: dict[bytes, bytes] = vars(os.environ).get("_variables") or os.environ._data  # type: ignore[attr-defined]
    return found


def _make_traced_class(base: Any) -> type:
    class _Environ(base):  # type: ignore[misc]
        @property
        def _data(self) -> Any:
            if sys._getframe(1).f_globals.get("__name__") not in ("os", "environment"):
                self.__dict__["_record"](f"reads {self.__dict__['_shown']}._data")
            return self.__dict__["_variables"]

        def __getitem__(self, key: Any) -> Any:
            listed = self.__dict__.get("_listed")  # names that were listed and are read in order: dict(os.environ)
            if listed and listed[-1] == key:
                listed.pop()
            else:
                self.__dict__["_on_read"](key)
            return base.__getitem__(self, key)

        def __contains__(self, key: object) -> bool:
            self.__dict__["_on_read"](key)
            return base.__contains__(self, key)  # type: ignore[no-any-return]

        def __iter__(self) -> Iterator[Any]:
            self.__dict__["_record"]("reads the whole environment")
            names = list(base.__iter__(self))
            self.__dict__["_listed"] = names[::-1]
            return iter(names)

        def __len__(self) -> int:
            self.__dict__["_record"]("reads the whole environment")
            return base.__len__(self)  # type: ignore[no-any-return]

        def __bool__(self) -> bool:
            return True

        def __repr__(self) -> str:
            self.__dict__["_record"]("reads the whole environment")
            return base.__repr__(self)  # type: ignore[no-any-return]

    _Environ.__module__, _Environ.__qualname__ = "os", "_Environ"
    return _Environ


class _TracedObject:
    """A mapping or a sequence that records each read."""

    def __init__(self, record: Record, name: str, value: Any) -> None:
        self.__dict__.update(_record=record, _name=name, _value=value)

    def _read(self) -> Any:
        self._record(f"reads {self._name}")
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._value[key] = value

    __hash__ = None  # type: ignore[assignment]


def _add_method(name: str, function: Callable[..., Any], *, reflected: bool = False) -> None:
    """Add a method of Python's protocols to ``_TracedObject``: Python does not ask ``__getattr__`` for these."""

    def method(self: _TracedObject, *others: Any) -> Any:
        value = self._read()
        return function(*others, value) if reflected else function(value, *others)

    setattr(_TracedObject, name, method)


for _function in (iter, len, repr):
    _add_method(f"__{_function.__name__}__", _function)
for _name in ("getitem", "contains", "eq", "add", "or_"):
    _add_method(f"__{_name.rstrip('_')}__", getattr(operator, _name))
for _name in ("add", "or_"):
    _add_method(f"__r{_name.rstrip('_')}__", getattr(operator, _name), reflected=True)


def trace_arguments(words: list[str], record: Record) -> None:
    """Replace ``sys.argv`` and ``sys.orig_argv``; by no lists, which C would read untraced (``" ".join``)."""
    for name in ("argv", "orig_argv"):
        setattr(sys, name, _TracedObject(record, f"sys.{name}", []))
    set_arguments(words)


def set_arguments(words: list[str]) -> None:
    """Change the traced arguments."""
    for name, value in (("argv", words), ("orig_argv", [sys.executable, *words])):
        getattr(sys, name).__dict__["_value"] = value


class _Main(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        space = object.__getattribute__(self, "__dict__")
        if name not in ("__spec__", "__class__") and (record := space.get("\0record")):
            record(f"reads __main__.{name}")
        return super().__getattribute__(name)


def trace_main(file: str, record: Record) -> None:
    """Replace ``__main__`` by a module of this file that records reads."""
    main = _Main("__main__")
    space: dict[str, Any] = object.__getattribute__(main, "__dict__")
    space.update({"\0record": record, "__builtins__": sys.modules["builtins"], "__file__": file})
    sys.modules["__main__"] = main


_LIBC = ctypes.CDLL(None)
_ENVIRON = ctypes.POINTER(ctypes.c_char_p).in_dll(_LIBC, "environ")
_TAKE_READ = getattr(_LIBC, "take_read", None)
if _TAKE_READ is not None:
    _TAKE_READ.restype = ctypes.c_char_p


def take_native_reads() -> Iterator[str]:
    """The variables that native code has read since the last call."""
    while _TAKE_READ is not None and (name := _TAKE_READ()) is not None:
        yield os.fsdecode(name)


def get_native_variables() -> dict[bytes, bytes]:
    """The environment as native code has it."""
    found, number = {}, 0
    while (each := _ENVIRON[number]) is not None:
        name, _, value = each.partition(b"=")
        found[name] = value
        number += 1
    return found
