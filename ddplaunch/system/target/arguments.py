"""Arguments of a function target in its rank: values for the function's parameters.

``argument_parser`` converts ``--name value`` words to them here, against the function itself, and checks them in the
launcher, against the signature read from the source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddplaunch.system.target.signature import INJECTED_PARAMETERS, Parameter, from_function


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
    from ddplaunch.system.target.argument_parser import (
        parse_arguments,  # with click, which a function that reads sys.argv does not need
    )

    given = parse_arguments(signature, words, live=True)
    for parameter in signature.parameters:
        if parameter.injected:
            given[parameter.name] = injected_value(parameter, facts, make_device)
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update(given)
    bound.apply_defaults()
    return list(bound.args), bound.kwargs


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
