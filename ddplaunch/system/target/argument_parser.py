"""Parses a function target's arguments with click, converts their values, and renders its help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import click

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.signature import INJECTED_PARAMETERS, Parameter, Signature, Value


def check_arguments(signature: Signature, words: Sequence[str]) -> None:
    """Check arguments against a signature that was read from source.

    Raises UsageError if one is missing, unknown or of the wrong type; the hint is the signature.
    """
    if signature.namespace:
        from ddplaunch.system.target.namespace_options import check_namespace  # argparse, which few need

        check_namespace(signature, words)
    elif not signature.reads_argv:
        parse_arguments(signature, words, live=False)


def is_help_request(signature: Signature, words: Sequence[str]) -> bool:
    """Whether the arguments contain --help or -h, and the function has no such parameter."""
    help_options = {"--help", "-h"}.intersection(takewhile(lambda word: word != "--", words))
    has_own = any(each.name in ("help", "h") for each in signature.typed)
    return bool(help_options) and not signature.reads_argv and not has_own


def function_help(signature: Signature) -> str:
    """Return the help of a function: its docstring, and its options with types and defaults."""
    if signature.namespace:
        from ddplaunch.system.target.namespace_options import build_parser

        return build_parser(signature, None).format_help()
    parameters = {parameter.name: parameter for parameter in signature.typed}
    rows = []
    for parameter in signature.typed:
        kind = parameter.text.lstrip("*").removeprefix(parameter.name).removeprefix(":").strip()
        if parameter.stars:
            rows.append(("WORD..." if parameter.stars == "*" else "--NAME VALUE...", kind))
            continue
        option = _option(parameter, parameters)
        spelled = " / ".join(each for each in (*option.opts, *option.secondary_opts) if "_" not in each)
        default = f"= {kind[1:]}" if kind.startswith("=") else kind
        rows.append((spelled, ", ".join(filter(None, (default, "required" * parameter.required)))))
    formatter = click.HelpFormatter(max_width=110)
    formatter.write_usage(f"ddplaunch run {signature.name}", "[OPTIONS]" if rows else "")
    if signature.doc:
        with formatter.indentation():
            formatter.write("\n" + "".join(f"  {line}".rstrip() + "\n" for line in signature.doc.splitlines()))
    if rows:
        with formatter.section("Options"):
            formatter.write_dl(rows)
    if given := [parameter.name for parameter in signature.parameters if parameter.injected]:
        formatter.write(f"\nFilled in by ddplaunch: {', '.join(given)}\n")
    return formatter.getvalue()


# ----------------------------------------------------------------------------------------------- words into options


def parse_arguments(signature: Signature, words: Sequence[str], *, live: bool) -> dict[str, object]:
    """Convert the arguments to values by parameter, without omitted ones: for these the function has defaults.

    With ``live``, the signature is that of the function object, and a type that is still unknown is an error.
    """
    parameters = {parameter.name: parameter for parameter in signature.typed if parameter.stars != "**"}
    catch_all = next((parameter for parameter in signature.typed if parameter.stars == "**"), None)
    others = _kwargs_options(words, parameters) if catch_all else {}
    options = [_option(parameter, parameters) for parameter in parameters.values()]
    options += [click.Option([spelling, name]) for name, spelling in others.items()]
    try:
        context = click.Command(None, params=options, add_help_option=False).make_context(None, list(words))
        missing = []
        given: dict[str, object] = {}
        for parameter in parameters.values():
            key = parameter.name.lower() if parameter.stars else parameter.name  # click lowers the case of arguments
            if _is_on_command_line(context, key):
                given[parameter.name] = _convert(parameter, parameter.name, context.params[key], live)
            elif parameter.required:
                missing.append(f"--{parameter.name}")
        if missing:
            raise _ArgumentError(f"needs {' and '.join([', '.join(missing[:-1])] * (len(missing) > 1) + missing[-1:])}")
        if catch_all:
            given[catch_all.name] = {name: _convert(catch_all, name, context.params[name], live) for name in others}
    except _ArgumentError as error:
        raise UsageError(f"{signature.name} {error}", f"its signature: {signature}") from None
    except click.ClickException as error:
        raise UsageError(f"{signature.name}: {_message(error, signature)}", f"its signature: {signature}") from None
    return given


class _ArgumentError(Exception):
    """An error in a function's arguments; its text continues a sentence that begins with the function's name."""


def _is_on_command_line(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE" and context.params[name] != ()


def _message(error: click.ClickException, signature: Signature) -> str:
    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    if name in INJECTED_PARAMETERS and any(parameter.name == name for parameter in signature.parameters):
        return f"{name} comes from ddplaunch, leave {error.option_name} out"  # type: ignore[attr-defined]
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _option(parameter: Parameter, parameters: Mapping[str, Parameter]) -> click.Parameter:
    name, value = parameter.name, parameter.value
    if parameter.stars:
        return click.Argument([name], nargs=-1)
    spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    if value.kind != "bool" or value.container:
        return click.Option([*spellings, name], multiple=value.container is not None)
    no = "" if f"no_{name}" in parameters else "/--no-"
    return click.Option([f"{each}{no and no + each[2:]}" for each in spellings] + [name], is_flag=True, default=None)


def _kwargs_options(words: Sequence[str], parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the options that only ``**kwargs`` accepts: their names and spellings."""
    others = {}
    for word in words:
        spelling = word.partition("=")[0]
        name = spelling.lstrip("-").replace("-", "_")
        if word.startswith("--") and name.isidentifier() and not {name, name.removeprefix("no_")} & {*parameters}:
            others[name] = spelling
    return others


# ------------------------------------------------------------------------------------------------ texts into values


def _convert(parameter: Parameter, name: str, given: Any, live: bool) -> Any:
    """Convert the text of an option, or the texts of a repeated one. Raises _ArgumentError if the type is wrong."""
    value = parameter.value
    try:
        if parameter.stars == "*":
            return tuple(_convert_one(value, text, live) for text in given)
        if value.container and not parameter.stars:
            if value.length not in (None, len(given)):
                raise _ArgumentError(f"cannot take --{name}: it has {value.length} values, and {len(given)} are given")
            return value.container([_convert_one(value, text, live) for text in given])
        return _convert_one(value, given, live)
    except click.BadParameter as error:
        raise _ArgumentError(f"cannot take --{name}: {error.message.rstrip('.')}") from None


def _convert_one(value: Value, text: Any, live: bool) -> Any:
    """Convert one text. Raises click.BadParameter, with the expected type, if it cannot be converted."""
    match value.kind:
        case "int" | "float" | "bool":
            return _CLICK_TYPES[value.kind].convert(text, None, None)
        case "number":
            if not _NUMBER.fullmatch(text) or len(text) > _MAX_DIGITS:
                raise click.BadParameter(f"{text!r} is not a number")
            return float(text) if set(text) & set(".eE") else int(text)
        case "choice":
            click.Choice(value.choices).convert(text, None, None)
        case "union":
            for side in value.sides:
                try:
                    return _convert_one(side, text, live)
                except click.BadParameter:
                    continue
            raise click.BadParameter(f"{text!r} is not one of {', '.join(side.kind for side in value.sides)}")
        case "any" if live:
            raise click.BadParameter("values of its type cannot be written on a command line")
    return value.convert(text) if value.convert else text


_CLICK_TYPES: dict[str, click.ParamType[Any]] = {"int": click.INT, "float": click.FLOAT, "bool": click.BOOL}
_MAX_DIGITS = 1000
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A number for a parameter without a type: not "nan", "inf" or "1_000"."""
