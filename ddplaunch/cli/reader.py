"""Reads the words behind ``ddplaunch run``; click, which takes longer to load than a plan to make, shows the help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile

from ddplaunch import TYPE_CHECKING
from ddplaunch.cli.command_line import HELP, Grammar, split
from ddplaunch.cli.option import Option, spellings
from ddplaunch.cli.options import LOG_JSON, OPTIONS, Options, Source
from ddplaunch.cli.typed import Remarks, check_target, program_names, remarks_on, translated
from ddplaunch.errors import UsageError, shown
from ddplaunch.output.voice import VOICE
from ddplaunch.words import choice, nearest

if TYPE_CHECKING:
    from typing import Any

YES, NO = ("1", "on", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no", "off")
"""The values of a flag's variable, in small or capital letters."""

_MORE = "ddplaunch run --help shows more"


def read(words: list[str]) -> tuple[Options, Remarks] | None:
    """Return what was typed behind ``ddplaunch run``; None where it asks for help.

    Raises:
        UsageError: the words make no sense.
    """
    # An error in these words is to be said in the form that they ask for; what they mean is known only afterwards.
    typed_json = "--log-json" in takewhile(lambda word: word != "--", words)
    VOICE.for_machines = typed_json or os.environ.get(LOG_JSON, "0") not in ("", "0")
    known = {**spellings(OPTIONS), **dict.fromkeys(HELP, False)}
    translation = translated(words, known, os.environ)
    line = split(translation, Grammar(known), program_names())
    if not HELP.isdisjoint(line.ours):
        return None
    check_target(line, known, "run")
    remarks = remarks_on(line, translation)
    typed = _typed(line.ours)
    values: dict[str, Any] = {"target": line.target, "args": line.program}
    sources = {"target": Source.TYPED, "args": Source.TYPED if line.program else Source.DEFAULT}
    by_name = {option.name: option for option in OPTIONS if not option.is_argument}
    for name in dict.fromkeys([*typed, *by_name]):  # click too looks at what was typed first, first
        values[name], sources[name] = _value(by_name[name], typed.get(name), os.environ)
        if not remarks.from_variables.isdisjoint(by_name[name].opts):
            sources[name] = Source.VARIABLE
    return Options(**values, sources={option.name: sources[option.name] for option in OPTIONS}), remarks


def _typed(words: tuple[str, ...]) -> dict[str, list[str]]:
    """The values typed of each option; of a flag, its spellings."""
    by_spelling = {name: option for option in OPTIONS for name in option.all_spellings}
    typed: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        option = by_spelling.get(name)  # None for --help, which only a value brings here
        if (option is None or option.is_flag) and equals:
            raise UsageError(f"Option '{name}' does not take a value")
        assert option is not None
        typed.setdefault(option.name, []).append(name if option.is_flag else text if equals else next(rest))
    return typed


def _value(option: Option, typed: list[str] | None, environ: Mapping[str, str]) -> tuple[Any, Source]:
    """The value of an option, and where it comes from."""
    variable = environ.get(option.envvar) if option.envvar else None
    source = Source.TYPED if typed else Source.VARIABLE if variable else Source.DEFAULT
    if option.is_flag:
        if typed:
            return typed[-1] != option.off, source
        return _yes_or_no(option, variable) if variable else None if option.off else False, source
    value: Any = tuple(typed or ()) if option.multiple else typed[-1] if typed else variable or option.default
    if option.choices and value is not None and value not in option.choices:
        near = nearest(value, option.choices)
        what = f"{option.opts[-1]} {shown(value, 60)}: expected {choice(option.choices)}"
        raise UsageError(what, f"did you mean {option.opts[-1]} {near}?" if near else _MORE)
    return option.read(option, value) if option.read else value, source


def _yes_or_no(option: Option, text: str) -> bool:
    if (said := text.strip().lower()) in (*YES, *NO):
        return said in YES
    raise UsageError(f"{option.envvar}={shown(text, 60)}: expected 1 or 0", _MORE)
