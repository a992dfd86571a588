"""Reads from a frame's bytecode which method it calls, on which object and with which first argument.

A method in C has no frame of its own, and the interpreter's stack cannot be read. The instructions before the call are
read backwards instead; names, attributes, items of lists and constants are looked up, and no code of the program runs.
It runs in ranks, by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

    Instruction = tuple[str, Any]  # its name in lower case

_SKIPPED = {"cache", "extended_arg", "nop", "precall", "push_null", "kw_names", "resume", "not_taken"}
_WITH = {"before_with", "setup_with"}
_CALLS = {"call", "call_method", "call_function", "call_kw", "call_function_kw"}
_NB_SUBSCR = 26  # the BINARY_OP that is BINARY_SUBSCR as of Python 3.14
_SHIFTED_SINCE = {"load_global": (3, 11), "load_attr": (3, 12)}
_MAX_BYTES = 1024  # of instructions before the call
_MAX_ITEMS = 16


class UnknownValue:
    """A value that is unknown without running code; ``function``: the function that would return it, if any."""

    def __init__(self, function: str = "") -> None:
        self.function = function


class _UnreadableError(Exception):
    """Raised for bytecode instructions that this module cannot read."""


def read_method_call(frame: FrameType, names: set[str]) -> tuple[str, Any, Any] | None:
    """Return the method that a frame is calling, its object and the first argument; None if it is not in ``names``.

    A ``with`` statement calls ``__enter__``; from Python 3.14 on, that call is not found.
    """
    instructions = _decode_last_instructions(frame)
    try:
        reader = _ExpressionReader(frame, instructions)
        if instructions[-1][0] in _WITH:
            del instructions[-1]
            return ("__enter__", reader.read(), UnknownValue()) if "__enter__" in names else None
        argument, method = reader.read_call()
        if method not in names:
            return None
        return method, reader.read(), argument
    except (_UnreadableError, IndexError):
        return None


def _decode_last_instructions(frame: FrameType) -> list[Instruction]:
    """Decode the instructions up to the current one; ``dis`` would take half a second for a script of 2,000 lines."""
    code, opcode = frame.f_code, sys.modules["opcode"]
    raw, instructions, extended = code.co_code, [], 0
    first_at = max(0, frame.f_lasti - _MAX_BYTES)
    while first_at and opcode.opname[raw[first_at - 2]].lower() == "extended_arg":
        first_at -= 2
    for at in range(first_at, frame.f_lasti + 2, 2):
        name, number = opcode.opname[raw[at]].lower(), raw[at + 1] | extended << 8
        extended = number if name == "extended_arg" else 0
        if name in _SKIPPED:
            continue
        try:
            if raw[at] in opcode.hasconst:
                instructions.append((name, code.co_consts[number]))
            elif raw[at] in opcode.hasname:
                shift = sys.version_info >= _SHIFTED_SINCE.get(name, (9,))  # the lowest bit has a meaning of its own
                instructions.append((name, code.co_names[number >> shift]))
            elif name.count("load_fast") + name.count("store_fast") == 2:  # two in one, as of Python 3.13
                first = "load_fast" if name.startswith("load") else "store_fast"
                instructions += [
                    (first, _variable_name(code, number >> 4)),
                    ("load_fast", _variable_name(code, number & 15)),
                ]
            elif raw[at] in opcode.haslocal or raw[at] in opcode.hasfree:
                instructions.append((name, _variable_name(code, number, is_free=raw[at] in opcode.hasfree)))
            else:
                instructions.append((name, number))
        except IndexError:  # its number has more in it than the name, as that of LOAD_SUPER_ATTR
            instructions.append(("unknown", number))
    return instructions


def _variable_name(code: CodeType, number: int, *, is_free: bool = False) -> str:
    if sys.version_info >= (3, 11):
        return str(code._varname_from_oparg(number))  # type: ignore[attr-defined]
    return ((*code.co_cellvars, *code.co_freevars) if is_free else code.co_varnames)[number]


class _ExpressionReader:
    """Reads expressions backwards, from the last instruction on."""

    def __init__(self, frame: FrameType, instructions: list[Instruction]) -> None:
        self._frame, self._left = frame, instructions

    def read_call(self) -> tuple[Any, str]:
        """Read a call: return its first argument and the name of its function; the next ``read`` returns its object."""
        name, count = self._left.pop()
        if name not in _CALLS:
            raise _UnreadableError
        if name in ("call_kw", "call_function_kw"):
            self._left.pop()  # the names of the arguments
        arguments = [self.read() for _ in range(count)]
        name, function = self._left.pop()
        if name not in ("load_attr", "load_method"):
            self._left.append((name, function))
            raise _UnreadableError
        return arguments[-1] if arguments else UnknownValue(), function

    def read(self) -> Any:
        """Return the value of the expression that ends at the last unread instruction, or ``UnknownValue``."""
        name, value = self._left[-1]
        if name in _CALLS:
            return self._read_call_result()
        self._left.pop()
        if name.startswith("load_fast") or name in ("load_name", "load_global", "load_deref", "load_classderef"):
            return self._look_up(value)
        if name in ("load_const", "load_small_int"):
            return value
        if name in ("load_attr", "load_method"):
            return _attribute(self.read(), value)
        if name in ("build_list", "build_tuple", "build_string"):
            items = [self.read() for _ in range(value)][::-1]
            return _join_strings(items) if name == "build_string" else items
        if name == "list_extend":
            return [*_list_items(self.read()), *_list_items(self.read())]
        if name == "format_simple" or (name == "format_value" and value == 0):
            return _format_value(self.read())
        if name.startswith("binary_"):
            key, of = self.read(), self.read()
            return _get_item(key, of) if name == "binary_subscr" or value == _NB_SUBSCR else UnknownValue()
        raise _UnreadableError

    def _read_call_result(self) -> UnknownValue:
        before = list(self._left)
        try:
            _, function = self.read_call()
            self.read()
        except _UnreadableError:  # the function is a name
            self._left = before
            name, count = self._left.pop()
            for _ in range(count + name.endswith("_kw")):
                self.read()
            name, function = self._left.pop()
            if name not in ("load_global", "load_name") and not name.startswith("load_fast"):
                raise
        return UnknownValue(str(function))

    def _look_up(self, name: str) -> Any:
        for known in (self._frame.f_locals, self._frame.f_globals):
            if name in known:
                return known[name]
        return UnknownValue()


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute that is stored in the object's ``__dict__``: a property would run the program's code."""
    try:
        return object.__getattribute__(value, "__dict__").get(name, UnknownValue())
    except AttributeError:
        return UnknownValue()


def _get_item(key: Any, value: Any) -> Any:
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return value.get(key, UnknownValue()) if type(value) is dict and type(key) in (str, int) else UnknownValue()


def _list_items(value: Any) -> list[Any]:
    return list(value[:_MAX_ITEMS]) if type(value) in (list, tuple) else [UnknownValue()]


def _format_value(value: Any) -> Any:
    return str(value) if type(value) in (str, int) else UnknownValue()


def _join_strings(parts: list[Any]) -> Any:
    return "".join(parts) if all(type(part) is str for part in parts) else UnknownValue()
