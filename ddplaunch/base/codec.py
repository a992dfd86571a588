"""Encodes and decodes messages: dataclasses as JSON objects ``{"op": …, "body": {…}}``, validated on decoding.

JSON is data and never code. Every field is checked against its annotation, which has its bounds (``bounds``), before
anything uses it. A module that declares messages need not import the types of its fields: they are looked up when the
first such message arrives, in that module, then in ``bounds``.
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

from ddplaunch.base import field_types as bounds
from ddplaunch.base.field_types import Validator
from ddplaunch.base.frames import ProtocolError, encode_frame

T = TypeVar("T")

_LOCK = allocate_lock()
"""msgspec analyses a class at its first use, and crashes if two threads do so at once (0.22)."""

_DECODE_ERRORS = (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError, RecursionError)


def parse(data: bytes, kind: type[T]) -> T:
    """Parse JSON as a ``kind``. Raises MsgspecError if it is invalid, RecursionError if nested too deeply."""
    with _LOCK:
        return msgspec.json.decode(data, type=kind)


def encode(message: object) -> bytes:
    """Return the frame of a message; fields with their default values are left out."""
    kind: Any = type(message)
    defaults = vars(kind)
    fields = {
        name: value for name in kind.__match_args__ if (value := getattr(message, name)) != defaults.get(name, Ellipsis)
    }
    return encode_frame(msgspec.json.encode({"op": kind.__name__, "body": fields}))


def decode(body: bytes, accepted_types: Iterable[type[T]]) -> T:
    """Return the message in ``body``; ProtocolError if it is not of ``accepted_types``, or a field is invalid."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in accepted_types}
    try:
        envelope = msgspec.json.decode(body)
        message: T = _validator_for(kinds[envelope["op"]])(envelope["body"])
        return message
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"a message that is not expected here ({type(error).__name__})") from None


def convert(value: Any, kind: Any) -> Any:
    """Convert lists, dictionaries, strings and numbers to a ``kind``; ProtocolError if they are invalid."""
    try:
        return _validator_for(kind)(value)
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"an invalid value ({type(error).__name__})") from None


def field_types(kind: Any) -> Mapping[str, Any]:
    """The types of a class's fields, bounds included."""
    module = sys.modules[kind.__module__]
    return {name: eval(text, {}, _AnnotationNamespace(module)) for name, text in kind.__annotations__.items()}


class _AnnotationNamespace(dict[str, Any]):
    """Resolves the names in a module's annotations."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            if name in vars(bounds):
                return vars(bounds)[name]
            raise KeyError(name) from None  # a builtin


@cache
def _validator_for(hint: Any) -> Validator:
    """Return a function that converts plain data to this type, or raises one of ``_DECODE_ERRORS``."""
    args = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _check_bound(_validator_for(args[0]), args[1])
        case origin if origin in (Union, UnionType):
            (kind,) = (each for each in args if each is not NoneType)
            return _check_optional(_validator_for(kind))
        case origin if origin is tuple:
            return (
                _check_sequence(_validator_for(args[0]))
                if args[1:] == (...,)
                else _check_tuple([*map(_validator_for, args)])
            )
        case origin if origin is Literal:
            return {each: each for each in args}.__getitem__
    if hint is Any:  # the receiver knows the type, and calls ``convert``
        return lambda value: value
    if is_dataclass(hint):
        return _construct({name: _validator_for(each) for name, each in field_types(hint).items()}, hint)
    if issubclass(hint, Enum):
        return lambda value: hint(value)
    if hint is bytes:
        return lambda value: b64decode(value, validate=True)
    return _check_type(hint)


def _check_type(kind: type) -> Validator:
    accepted = (int, float) if kind is float else (kind,)

    def check(value: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"no {kind.__name__}")
        return kind(value)

    return check


def _check_bound(check: Validator, bound: Validator) -> Validator:
    return lambda value: bound(check(value))


def _check_optional(check: Validator) -> Validator:
    return lambda value: None if value is None else check(value)


def _check_sequence(check: Validator) -> Validator:
    return lambda values: tuple([check(each) for each in _as_list(values)])


def _check_tuple(checks: list[Validator]) -> Validator:
    return lambda values: tuple([check(each) for check, each in zip(checks, _as_list(values), strict=True)])


def _as_list(values: Any) -> list[Any]:
    if type(values) is not list:
        raise TypeError("no list")
    return values


def _construct(checks: Mapping[str, Validator], kind: Any) -> Validator:
    def make(value: Any) -> Any:
        if type(value) is not dict:
            raise TypeError("no object")
        return kind(**{name: check(value[name]) for name, check in checks.items() if name in value})

    return make
