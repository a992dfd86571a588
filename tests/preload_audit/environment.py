"""Records reads of the environment, the arguments and ``__main__``, inside an audit's interpreters.

Standard library only; run from its path. What native code reads is known from ``asked.c``, which is to be loaded
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

    See = Callable[[object], None]
    Note = Callable[[str], None]


def trace_environment(see: See, note: Note) -> None:
    """Call ``see`` with each variable that is read by its name, and ``note`` for reads of all."""
    for name in ("environ", "environb"):
        environ: Any = getattr(os, name)
        data = environ.__dict__.pop("_data")
        environ.__dict__.update(_kept=data, _see=see, _note=note, _called=f"os.{name}")
        environ.__class__ = _traced(type(environ))
    posix.environ = _Forbidden(note, "posix.environ", posix.environ)  # type: ignore[assignment]


def data() -> dict[bytes, bytes]:
    """The variables themselves, read without a note."""
    found: dict[bytes, bytes] = vars(os.environ).get("_kept") or os.environ._data  # type: ignore[attr-defined]
    return found


def _traced(base: Any) -> type:
    class _Environ(base):  # type: ignore[misc]
        @property
        def _data(self) -> Any:
            if sys._getframe(1).f_globals.get("__name__") not in ("os", "environment"):
                self.__dict__["_note"](f"reads {self.__dict__['_called']}._data")
            return self.__dict__["_kept"]

        def __getitem__(self, key: Any) -> Any:
            listed = self.__dict__.get("_listed")  # names that were listed and are read in order: dict(os.environ)
            if listed and listed[-1] == key:
                listed.pop()
            else:
                self.__dict__["_see"](key)
            return base.__getitem__(self, key)

        def __contains__(self, key: object) -> bool:
            self.__dict__["_see"](key)
            return base.__contains__(self, key)  # type: ignore[no-any-return]

        def __iter__(self) -> Iterator[Any]:
            self.__dict__["_note"]("reads the whole environment")
            names = list(base.__iter__(self))
            self.__dict__["_listed"] = names[::-1]
            return iter(names)

        def __len__(self) -> int:
            self.__dict__["_note"]("reads the whole environment")
            return base.__len__(self)  # type: ignore[no-any-return]

        def __bool__(self) -> bool:
            return True

        def __repr__(self) -> str:
            self.__dict__["_note"]("reads the whole environment")
            return base.__repr__(self)  # type: ignore[no-any-return]

        def __delitem__(self, key: Any) -> None:  # pop() asks for the value, which is seen
            base.__delitem__(self, key)

    _Environ.__module__, _Environ.__qualname__ = "os", "_Environ"
    return _Environ


class _Forbidden:
    """A mapping or a sequence that says when it is asked anything."""

    def __init__(self, note: Note, name: str, inside: Any) -> None:
        self.__dict__.update(_note=note, _name=name, _inside=inside)

    def _asked(self) -> Any:
        self._note(f"reads {self._name}")
        return self._inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asked(), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._inside[key] = value

    __hash__ = None  # type: ignore[assignment]


def _forward(name: str, function: Callable[..., Any], *, reflected: bool = False) -> None:
    """Let ``_Forbidden`` have this method of Python's protocols, which ``__getattr__`` does not see."""

    def asking(self: _Forbidden, *others: Any) -> Any:
        inside = self._asked()
        return function(*others, inside) if reflected else function(inside, *others)

    setattr(_Forbidden, name, asking)


for _function in (iter, len, repr):
    _forward(f"__{_function.__name__}__", _function)
for _name in ("getitem", "contains", "eq", "add", "or_"):
    _forward(f"__{_name.rstrip('_')}__", getattr(operator, _name))
for _name in ("add", "or_"):
    _forward(f"__r{_name.rstrip('_')}__", getattr(operator, _name), reflected=True)


def trace_arguments(words: list[str], note: Note) -> None:
    """Replace ``sys.argv`` and ``sys.orig_argv``; no list, as C reads one without asking (``" ".join``)."""
    for name in ("argv", "orig_argv"):
        setattr(sys, name, _Forbidden(note, f"sys.{name}", []))
    set_arguments(words)


def set_arguments(words: list[str]) -> None:
    """Have these from here on, traced or not."""
    for name, inside in (("argv", words), ("orig_argv", [sys.executable, *words])):
        there = getattr(sys, name)
        if isinstance(there, _Forbidden):
            there.__dict__["_inside"] = inside
        else:
            setattr(sys, name, inside)


class _Main(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        space = object.__getattribute__(self, "__dict__")
        if name not in ("__spec__", "__class__") and (note := space.get("\0note")):
            note(f"reads __main__.{name}")
        return super().__getattribute__(name)


def make_main(file: str, note: Note) -> dict[str, Any]:
    """Make a ``__main__`` of this file that records reads; return its content."""
    main = _Main("__main__")
    space: dict[str, Any] = object.__getattribute__(main, "__dict__")
    space.update({"\0note": note, "__builtins__": sys.modules["builtins"], "__file__": file})
    sys.modules["__main__"] = main
    return space


_LIBC = ctypes.CDLL(None)
_ENVIRON = ctypes.POINTER(ctypes.c_char_p).in_dll(_LIBC, "environ")
_TAKE = getattr(_LIBC, "take_asked", None)
if _TAKE is not None:
    _TAKE.restype = ctypes.c_char_p


def take_native_reads() -> Iterator[str]:
    """The variables that native code has read since the last call."""
    while _TAKE is not None and (name := _TAKE()) is not None:
        yield os.fsdecode(name)


def native_data() -> dict[bytes, bytes]:
    """The environment as native code has it."""
    found, number = {}, 0
    while (each := _ENVIRON[number]) is not None:
        name, _, value = each.partition(b"=")
        found[name] = value
        number += 1
    return found
