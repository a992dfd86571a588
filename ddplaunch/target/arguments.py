"""A function target's arguments: ``--name value`` words into its parameters.

The same code checks them before anything starts, against the signature read from the source, and converts them in the
rank, against the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ddplaunch.target.signature import INJECTED_PARAMETERS, Parameter, Signature, from_function


def check_arguments(signature: Signature, words: Sequence[str]) -> None:
    """Check ``words`` against a signature that was read from source.

    Raises UsageError if one is missing, unknown or of the wrong kind; the hint is the signature.
    """
    if not signature.reads_argv:
        _parse_by_signature(signature, words, live=False)


def is_help_request(signature: Signature, words: Sequence[str]) -> bool:
    """Whether ``words`` ask for help with the function's own options."""
    asked = {"--help", "-h"} & {*takewhile(lambda word: word != "--", words)}
    return bool(asked) and not signature.reads_argv and all(each.name not in ("help", "h") for each in signature.typed)


def function_help(signature: Signature) -> str:
    """The function's docstring and its options with their types and defaults, as ``--help`` shows them."""
    from ddplaunch.target import parsing

    return parsing.function_help(signature)


def bind_arguments(
    name: str,
    function: Callable[..., Any],
    words: Sequence[str],
    facts: Mapping[str, Any],
    make_device: Callable[[str], object],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments to call ``function`` with. Raises UsageError as ``check_arguments`` does.

    ``facts`` are the values behind the well-known names; "device" as torch names it, and ``make_device`` makes one.
    """
    try:
        signature = from_function(name, function)
    except (TypeError, ValueError):
        return [], {}  # made in C, without a signature: it gets nothing and may read sys.argv
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
    from ddplaunch.target.parsing import (
        parse_arguments,  # with click, which a function that reads sys.argv does not need
    )

    return parse_arguments(signature, words, live=live)


def injected_value(parameter: Parameter, facts: Mapping[str, Any], make_device: Callable[[str], object]) -> Any:
    """The value that ddplaunch gives to one of the well-known parameters; "device" also as a name or a local rank."""
    fact = INJECTED_PARAMETERS[parameter.name]
    if fact != "device":
        return facts[fact]
    if parameter.value.kind == "str":
        return facts["device"]
    if parameter.value.kind == "int":
        return facts["local_rank"]
    return make_device(facts["device"])
