"""Arguments of a function target: converts ``--name value`` words to the function's parameters.

The same code checks them in the launcher, against the signature read from the source, and converts them in the rank,
against the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ddplaunch.system.target.signature import INJECTED_PARAMETERS, Parameter, Signature, from_function


def check_arguments(signature: Signature, words: Sequence[str]) -> None:
    """Check arguments against a signature that was read from source.

    Raises UsageError if one is missing, unknown or of the wrong type; the hint is the signature.
    """
    if not signature.reads_argv:
        _parse_by_signature(signature, words, live=False)


def is_help_request(signature: Signature, words: Sequence[str]) -> bool:
    """Whether the arguments contain --help or -h, and the function has no such parameter."""
    help_options = {"--help", "-h"} & {*takewhile(lambda word: word != "--", words)}
    return (
        bool(help_options)
        and not signature.reads_argv
        and all(each.name not in ("help", "h") for each in signature.typed)
    )


def function_help(signature: Signature) -> str:
    """Return the help of a function: its docstring, and its options with types and defaults."""
    from ddplaunch.system.target import argument_parser

    return argument_parser.function_help(signature)


def bind_arguments(
    name: str,
    function: Callable[..., Any],
    words: Sequence[str],
    facts: Mapping[str, Any],
    make_device: Callable[[str], object],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments for ``function``. Raises UsageError like ``check_arguments``.

    ``facts`` are the values of the injected parameters; "device" is torch's name, for ``make_device``.
    """
    try:
        signature = from_function(name, function)
    except (TypeError, ValueError):
        return [], {}  # written in C, without a signature: called without arguments, may read sys.argv
    if signature.reads_argv:
        return [], {}
    given = _parse_by_signature(signature, words, live=True)
    for parameter in signature.parameters:
        if parameter.injected:
            given[parameter.name] = injected_value(parameter, facts, make_device)
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update(given)
    bound.apply_defaults()
    return list(bound.args), bound.kwargs


def _parse_by_signature(signature: Signature, words: Sequence[str], *, live: bool) -> dict[str, Any]:
    from ddplaunch.system.target.argument_parser import (
        parse_arguments,  # with click, which a function that reads sys.argv does not need
    )

    return parse_arguments(signature, words, live=live)


def injected_value(parameter: Parameter, facts: Mapping[str, Any], make_device: Callable[[str], object]) -> Any:
    """Return the value of an injected parameter; a "device" of type str or int gets the name or the local rank."""
    fact = INJECTED_PARAMETERS[parameter.name]
    if fact != "device":
        return facts[fact]
    if parameter.value.kind == "str":
        return facts["device"]
    if parameter.value.kind == "int":
        return facts["local_rank"]
    return make_device(facts["device"])
