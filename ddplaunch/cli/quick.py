"""A plain ``ddplaunch run`` read without click. What is not plain, or wrong, is left to click, and to its messages."""

from __future__ import annotations

import os

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.command_line import HELP, split
from ddplaunch.cli.option import Option, spellings
from ddplaunch.cli.options import OPTIONS, Options, Source
from ddplaunch.cli.typed import Remarks, program_names, remarks_on, translated
from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from typing import Any


class _NotPlainError(Exception):
    """click is to read the line."""


def read(words: list[str]) -> tuple[Options, Remarks] | None:
    """Return what was typed behind ``ddplaunch run``, as click would read it; None where click is to read it."""
    known = {**spellings(OPTIONS), **dict.fromkeys(HELP, False)}
    try:
        translation = translated(words, known, os.environ)
        line = split(
            translation.words,
            known,
            program_names(),
            ends_at_target=translation.of_torchrun,
            unsaid=translation.unsaid,
        )
        if line.target is None or HELP & set(line.ours):
            return None
        remarks = remarks_on(line, translation)
        typed = _typed(line.ours)
        values: dict[str, Any] = {"target": line.target, "args": line.program}
        sources = {"target": Source.TYPED, "args": Source.TYPED if line.program else Source.DEFAULT}
        for option in OPTIONS:
            if not option.is_argument:
                values[option.name], sources[option.name] = _value(option, typed.get(option.name))
                if not remarks.from_variables.isdisjoint(option.opts):
                    sources[option.name] = Source.VARIABLE
    except (UsageError, _NotPlainError):
        return None
    return Options(**values, sources=sources), remarks


def _typed(words: tuple[str, ...]) -> dict[str, list[str]]:
    """The values typed of each option; of a flag, its spellings."""
    by_spelling = {name: option for option in OPTIONS for name in option.all_spellings}
    typed: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        option = by_spelling.get(name)
        if option is None or (option.is_flag and equals):
            raise _NotPlainError
        typed.setdefault(option.name, []).append(name if option.is_flag else text if equals else next(rest))
    return typed


def _value(option: Option, typed: list[str] | None) -> tuple[Any, Source]:
    """The value of an option, and where it comes from."""
    variable = os.environ.get(option.envvar) if option.envvar else None
    if option.is_flag:
        if variable and not typed:
            if variable not in ("0", "1"):
                raise _NotPlainError  # click knows many words for yes and no
            return variable == "1", Source.VARIABLE
        if typed:
            return typed[-1] != option.off, Source.TYPED
        return None if option.off else False, Source.DEFAULT
    value: Any = None
    if option.multiple:
        value = tuple(typed or ())
    elif typed:
        value = typed[-1]
    else:
        value = variable or option.default
    if option.choices and value is not None and value not in option.choices:
        raise _NotPlainError
    source = Source.TYPED if typed else Source.VARIABLE if variable else Source.DEFAULT
    return option.read(option, value) if option.read else value, source
