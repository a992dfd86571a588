"""YAML that people read: two spaces a level, comments above.

Programs that read YAML 1.1 or 1.2 get the same: a string that either takes for a number, a truth value, a date or null
is quoted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError

WIDTH = 110  # columns for a list of scalars in one line
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][\w./+=@-]*(:[\w./+=@-]+)*", re.ASCII)
"""Strings that get no quotes. All others do, though some would not need them."""

_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 reads as something else, in any case (yaml.org/type/bool.html)."""

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True)
class Noted:
    """A value with the comment that stands above it."""

    comment: str
    value: Any


def document(mapping: Mapping[str, Any]) -> str:
    """Write mappings, sequences, strings, numbers and truth values as one document.

    Raises UsageError if a string has a character that YAML cannot hold.
    """
    return "\n".join(_mapping(mapping, "")) + "\n"


def _mapping(mapping: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, Noted):
            yield from _comment(value, indent)
            value = value.value
        name = f"{indent}{_scalar(key)}:"
        if isinstance(value, Mapping) and not value:
            yield f"{name} {{}}"
        elif isinstance(value, Mapping):
            yield name
            yield from _mapping(value, indent + "  ")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            line = (
                None
                if any(isinstance(each, (Mapping, Noted, list)) for each in value)
                else f"{name} {_in_a_line(value)}"
            )
            if line is not None and len(line) <= WIDTH:
                yield line
            else:
                yield name
                yield from _sequence(value, indent + "  ")
        else:
            yield f"{name} {_scalar(value)}"


def _sequence(values: Sequence[Any], indent: str) -> Iterator[str]:
    for value in values:
        if isinstance(value, Noted):
            yield from _comment(value, indent)
            value = value.value
        if isinstance(value, (Mapping, list)) and value:
            deeper = indent + "  "
            first, *others = _mapping(value, deeper) if isinstance(value, Mapping) else _sequence(value, deeper)
            yield f"{indent}- {first.lstrip(' ')}"
            yield from others
        else:
            yield f"{indent}- {_scalar(value)}"


def _comment(noted: Noted, indent: str) -> Iterator[str]:
    for line in noted.comment.splitlines():
        yield f"{indent}# {line}"


def _in_a_line(values: Sequence[Any]) -> str:
    return f"[{', '.join(_quoted(each) if isinstance(each, str) else _scalar(each) for each in values)}]"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if value is None or value == {} or value == []:
        return "null" if value is None else str(value)
    assert isinstance(value, str), value
    return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)


def _float(value: float) -> str:
    """YAML 1.1 wants a dot in every float, and JSON, which Kubernetes makes of it, has no infinity."""
    if not math.isfinite(value):
        raise UsageError(f"a manifest cannot hold {value}", "write a number")
    number, exponent, power = repr(value).partition("e")
    return f"{number if '.' in number else number + '.0'}{exponent}{power}"


def _quoted(text: str) -> str:
    return '"' + "".join(map(_letter, text)) + '"'


def _letter(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    if code == 0 or 0xD800 <= code < 0xE000:  # surrogates: bytes of a command line that are not UTF-8
        raise UsageError(f"a manifest cannot hold {letter!r}", "use text in UTF-8")
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
