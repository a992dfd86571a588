"""Records reads and writes of variables in the C library, inside an audit's interpreters.

Standard library only; run from its path. ``asked.c`` is to be loaded before the C library (LD_PRELOAD).
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBC = ctypes.CDLL(None)
_ENVIRON = ctypes.POINTER(ctypes.c_char_p).in_dll(_LIBC, "environ")
_TAKE = getattr(_LIBC, "take_asked", None)
if _TAKE is not None:
    _TAKE.restype = ctypes.c_char_p


def asked() -> Iterator[str]:
    """The variables that native code has asked for since the last call."""
    while _TAKE is not None and (name := _TAKE()) is not None:
        yield os.fsdecode(name)


def variables() -> dict[bytes, bytes]:
    """The environment as native code has it."""
    found, number = {}, 0
    while (each := _ENVIRON[number]) is not None:
        name, _, value = each.partition(b"=")
        found[name] = value
        number += 1
    return found
