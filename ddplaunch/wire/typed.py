"""Plain data as typed values, and messages as JSON objects ``{"op": …, "body": {…}}``.

JSON is data and never code. Every field is checked against the message's own annotations (by msgspec), then for its
range and meaning (``bounds``), before anything acts on it. msgspec builds what it has to know of a class when it first
meets it, and crashes if two threads do so at once (0.22).
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from ddplaunch.control import messages
from ddplaunch.control.bounds import bounded
from ddplaunch.diagnosis.inspection import Arrivals, Detail, Inspection
from ddplaunch.plan import share
from ddplaunch.wire.frames import Garbled, frame

T = TypeVar("T")

_LOCK = allocate_lock()

vars(messages).update(Arrivals=Arrivals, Detail=Detail, Inspection=Inspection, Literal=Literal)
vars(share).update(Literal=Literal)
"""msgspec looks there for the types of their fields; a job that says nothing to others starts 3 ms earlier without."""


def convert(value: Any, kind: type[T]) -> T:
    """Return lists, dictionaries, texts and numbers as a ``kind``. Raises MsgspecError if they are none."""
    with _LOCK:
        return msgspec.convert(value, kind)


def parse(data: bytes, kind: type[T]) -> T:
    """Return JSON as a ``kind``. Raises MsgspecError if it is none, RecursionError if it is nested too deeply."""
    with _LOCK:
        return msgspec.json.decode(data, type=kind)


def encode(message: object) -> bytes:
    """Return the frame of a message."""
    kind: Any = type(message)
    said = {name: value for name, default in _defaults(kind) if (value := getattr(message, name)) != default}
    return frame(msgspec.json.encode({"op": kind.__name__, "body": said}))


@cache
def _defaults(kind: type) -> tuple[tuple[str, object], ...]:
    """The fields of a message and the values that go without saying."""
    return tuple((each.name, each.default) for each in fields(kind))


def decode(body: bytes, accepted: Iterable[type[T]]) -> T:
    """Return the message in ``body``; Garbled if it is not an ``accepted`` one, or a field makes no sense."""
    kinds = {kind.__name__: kind for kind in accepted}
    try:
        envelope = msgspec.json.decode(body)
        kind = kinds[envelope["op"]]
        message: T = bounded(convert(envelope["body"], kind))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Garbled(f"a message that is not expected here ({type(error).__name__})") from None
    return message
