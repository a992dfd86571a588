"""Plain data as typed values, and messages as JSON objects ``{"op": …, "body": {…}}``.

JSON is data and never code. Every field is checked against its annotation, which carries its bounds (``bounds``),
before anything acts on it. Who declares a message need not load the types of its fields: they are looked for when the
first such message comes, in the module of the class, then in ``bounds``.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from ddplaunch.wire import bounds
from ddplaunch.wire.bounds import Check
from ddplaunch.wire.frames import Garbled, frame

T = TypeVar("T")

_LOCK = allocate_lock()
"""msgspec builds what it has to know of a class at its first use, and crashes if two threads do so at once (0.22)."""

_WRONG = (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


def parse(data: bytes, kind: type[T]) -> T:
    """Return JSON as a ``kind``. Raises MsgspecError if it is none, RecursionError if it is nested too deeply."""
    with _LOCK:
        return msgspec.json.decode(data, type=kind)


def encode(message: object) -> bytes:
    """Return the frame of a message, without the fields that have their defaults."""
    kind: Any = type(message)
    defaults = vars(kind)
    said = {
        name: value for name in kind.__match_args__ if (value := getattr(message, name)) != defaults.get(name, Ellipsis)
    }
    return frame(msgspec.json.encode({"op": kind.__name__, "body": said}))


def decode(body: bytes, accepted: Iterable[type[T]]) -> T:
    """Return the message in ``body``; Garbled if it is not an ``accepted`` one, or a field makes no sense."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in accepted}
    try:
        envelope = msgspec.json.decode(body)
        message: T = _check(kinds[envelope["op"]])(envelope["body"])
        return message
    except _WRONG as error:
        raise Garbled(f"a message that is not expected here ({type(error).__name__})") from None


def convert(value: Any, kind: Any) -> Any:
    """Return lists, dictionaries, texts and numbers as a ``kind``; Garbled if they are none."""
    try:
        return _check(kind)(value)
    except _WRONG as error:
        raise Garbled(f"a value that is none ({type(error).__name__})") from None


def fields(kind: Any) -> Mapping[str, Any]:
    """The types of a class's fields, bounds included."""
    module = sys.modules[kind.__module__]
    return {name: eval(text, {}, _Names(module)) for name, text in kind.__annotations__.items()}


class _Names(dict[str, Any]):
    """What the names in a module's annotations stand for."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            if name in vars(bounds):
                return vars(bounds)[name]
            raise KeyError(name) from None  # one of Python's own


@cache
def _check(hint: Any) -> Check:
    """What returns plain data as a value of this type, and raises an exception of ``_WRONG`` where it is none."""
    inner = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _bounded(_check(inner[0]), inner[1])
        case origin if origin in (Union, UnionType):
            (kind,) = (each for each in inner if each is not NoneType)
            return _optional(_check(kind))
        case origin if origin is tuple:
            return _many(_check(inner[0])) if inner[1:] == (...,) else _few([*map(_check, inner)])
        case origin if origin is Literal:
            return {each: each for each in inner}.__getitem__
    if is_dataclass(hint):
        return _made({name: _check(each) for name, each in fields(hint).items()}, hint)
    if issubclass(hint, Enum):
        return lambda value: hint(value)
    if hint is bytes:
        return lambda value: b64decode(value, validate=True)
    return _plain(hint)


def _plain(kind: type) -> Check:
    taken = (int, float) if kind is float else (kind,)

    def check(value: Any) -> Any:
        if type(value) not in taken:
            raise TypeError(f"no {kind.__name__}")
        return kind(value)

    return check


def _bounded(check: Check, bound: Check) -> Check:
    return lambda value: bound(check(value))


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _many(check: Check) -> Check:
    return lambda values: tuple([check(each) for each in _list(values)])


def _few(checks: list[Check]) -> Check:
    return lambda values: tuple([check(each) for check, each in zip(checks, _list(values), strict=True)])


def _list(values: Any) -> list[Any]:
    if type(values) is not list:
        raise TypeError("no list")
    return values


def _made(checks: Mapping[str, Check], kind: Any) -> Check:
    def make(value: Any) -> Any:
        if type(value) is not dict:
            raise TypeError("no object")
        return kind(**{name: check(value[name]) for name, check in checks.items() if name in value})

    return make
