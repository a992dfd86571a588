"""Plain data as typed values, by msgspec, one thread at a time.

msgspec builds what it has to know of a class when it first meets it, and crashes if two threads do so at once (0.22).
"""

from __future__ import annotations

from _thread import allocate_lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LOCK = allocate_lock()


def convert(value: Any, kind: type[T]) -> T:
    """Return lists, dictionaries, texts and numbers as a ``kind``. Raises MsgspecError if they are none."""
    with _LOCK:
        return msgspec.convert(value, kind)


def decode(data: bytes, kind: type[T]) -> T:
    """Return JSON as a ``kind``. Raises MsgspecError if it is none, RecursionError if it is nested too deeply."""
    with _LOCK:
        return msgspec.json.decode(data, type=kind)
