"""Parses the command line of ``ddplaunch run`` without click, whose import takes longer than making a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import closest_match, join_alternatives
from ddplaunch.cli.argv_splitter import HELP, ArgvGrammar, split_argv
from ddplaunch.cli.option_declaration import Option, option_spellings
from ddplaunch.cli.run_options import LOG_JSON_VARIABLE, OPTIONS, OptionSource, RunOptions
from ddplaunch.cli.target_args import ParseNotes, check_target, make_option_lookup, parse_notes_for, translate_torchrun
from ddplaunch.core.output.log_message import FORMATTER

TRUE_WORDS, FALSE_WORDS = ("1", "on", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no", "off")
"""The values of a flag's environment variable, in any case."""

_HELP_HINT = "ddplaunch run --help shows more"


def read_options(words: list[str]) -> tuple[RunOptions, ParseNotes] | None:
    """Parse the words after ``ddplaunch run``; return None if they ask for help.

    Raises:
        UsageError: an option or value is invalid.
    """
    # Before parsing, so that errors of parsing are written in the requested form too.
    typed_json = "--log-json" in takewhile(lambda word: word != "--", words)
    FORMATTER.as_json = typed_json or os.environ.get(LOG_JSON_VARIABLE, "0") not in ("", "0")
    known = {**option_spellings(OPTIONS), **dict.fromkeys(HELP, False)}
    translation = translate_torchrun(words, known, os.environ)
    line = split_argv(translation, ArgvGrammar(known), make_option_lookup())
    if not HELP.isdisjoint(line.options):
        return None
    check_target(line, known, "run")
    notes = parse_notes_for(line, translation)
    typed = _collect_values(line.options)
    values: dict[str, Any] = {"target": line.target, "args": line.program_args}
    sources = {"target": OptionSource.TYPED, "args": OptionSource.TYPED if line.program_args else OptionSource.DEFAULT}
    by_name = {option.name: option for option in OPTIONS if not option.is_argument}
    for name in dict.fromkeys([*typed, *by_name]):  # in click's order: what was typed first is checked first
        values[name], sources[name] = _option_value(by_name[name], typed.get(name), os.environ)
        if not notes.from_variables.isdisjoint(by_name[name].opts):
            sources[name] = OptionSource.VARIABLE
    return RunOptions(**values, sources={option.name: sources[option.name] for option in OPTIONS}), notes


def _collect_values(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the texts of each option's values; for a flag, its spellings."""
    by_spelling = {name: option for option in OPTIONS for name in option.all_spellings}
    typed: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        option = by_spelling.get(name)  # None for --help=VALUE
        if (option is None or option.is_flag) and equals:
            raise UsageError(f"Option '{name}' does not take a value")
        assert option is not None
        typed.setdefault(option.name, []).append(name if option.is_flag else text if equals else next(rest))
    return typed


def _option_value(option: Option, typed: list[str] | None, environ: Mapping[str, str]) -> tuple[Any, OptionSource]:
    """Return the value of an option and where it comes from."""
    variable = environ.get(option.envvar) if option.envvar else None
    source = OptionSource.TYPED if typed else OptionSource.VARIABLE if variable else OptionSource.DEFAULT
    if option.is_flag:
        if typed:
            return typed[-1] != option.off, source
        return _parse_bool(option, variable) if variable else None if option.off else False, source
    value: Any = tuple(typed or ()) if option.multiple else typed[-1] if typed else variable or option.default
    if option.choices and value is not None and value not in option.choices:
        near = closest_match(value, option.choices)
        what = f"{option.opts[-1]} {sanitize_line(value, 60)}: expected {join_alternatives(option.choices)}"
        raise UsageError(what, f"did you mean {option.opts[-1]} {near}?" if near else _HELP_HINT)
    return option.read(option, value) if option.read else value, source


def _parse_bool(option: Option, text: str) -> bool:
    if (word := text.strip().lower()) in (*TRUE_WORDS, *FALSE_WORDS):
        return word in TRUE_WORDS
    raise UsageError(f"{option.envvar}={sanitize_line(text, 60)}: expected 1 or 0", _HELP_HINT)
