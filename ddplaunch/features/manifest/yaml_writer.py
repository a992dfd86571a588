"""YAML writer for readable documents, based on PyYAML: keys in the given order, comments above them.

Parsers of YAML 1.1 and 1.2 get the same values: a string that either would read as a number, boolean, date or null is
quoted; PyYAML itself only follows the rules of 1.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddplaunch.base.errors import UsageError

WIDTH = 110  # columns; shorter lists of scalars go in one line
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][\w./+=@-]*(:[\w./+=@-]+)*", re.ASCII)
"""Strings that need no quotes. All others get them, even if some would not need them."""

_RESERVED_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 reads as booleans or null, in upper and lower case (yaml.org/type/bool.html)."""


class _CommentedKey(str):
    comment: str


def with_comment(key: str, comment: str) -> str:
    """Return a mapping key with a comment to write above it, or above the list entry of which it is the first key."""
    commented = _CommentedKey(key)
    commented.comment = comment
    return commented


def drop_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are None or empty."""
    return {name: value for name, value in fields.items() if value is not None and value not in ({}, [], ())}


def write_yaml(mapping: Mapping[str, Any]) -> str:
    """Write mappings, sequences, strings, numbers and booleans as YAML.

    Raises UsageError if a string has a character that YAML cannot hold.
    """
    style: dict[str, Any] = {"sort_keys": False, "default_flow_style": False, "allow_unicode": True, "width": math.inf}
    return str(yaml.dump(mapping, Dumper=_Dumper, **style))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's writer, extended to write comments, in two states of its emitter (yaml/emitter.py)."""

    above: object = None  # the key whose comment was written last

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def expect_block_mapping_key(self, first: bool = False) -> None:
        self._write_comment(self.event)
        super().expect_block_mapping_key(first)

    def expect_block_sequence_item(self, first: bool = False) -> None:
        if isinstance(self.event, yaml.MappingStartEvent):
            self._write_comment(self.events[0])
        super().expect_block_sequence_item(first)

    def _write_comment(self, event: Any) -> None:
        key = getattr(event, "value", None)
        if isinstance(key, _CommentedKey) and key is not self.above:
            self.above = key
            for line in key.comment.splitlines():
                self.write_indent()
                self.write_indicator(f"# {line}", need_whitespace=False)


def _represent_string(dumper: _Dumper, text: str) -> Any:
    if odd := re.search("[\0\ud800-\udfff]", text):  # surrogates: bytes of a command line that are not UTF-8
        raise UsageError(f"a manifest cannot hold {odd[0]!r}", "use text in UTF-8")
    style = None if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED_WORDS else '"'
    if "\n" in text and all(line.isprintable() for line in text.split("\n")):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _represent_list(dumper: _Dumper, values: Sequence[Any]) -> Any:
    """Write a short list of scalars in one line."""
    scalars = not any(isinstance(each, (Mapping, list, tuple)) for each in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, scalars and len(repr(values)) < WIDTH)


for _kind, _represent in {
    str: _represent_string,
    _CommentedKey: _represent_string,
    list: _represent_list,
    tuple: _represent_list,
}.items():
    _Dumper.add_representer(_kind, _represent)
