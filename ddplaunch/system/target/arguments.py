"""Arguments of a function target in its rank: values for the function's parameters.

``argument_parser`` converts ``--name value`` words to them here, against the function itself, and checks them in the
launcher, against the signature read from the source.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.signature import (
    INJECTED_PARAMETERS,
    ArgumentValues,
    Parameter,
    find_namespace,
    from_function,
    with_namespace,
)


def bind_arguments(
    name: str,
    function: Callable[..., Any],
    words: Sequence[str],
    values: ArgumentValues,
    make_device: Callable[[str], object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional and keyword arguments for ``function``. Raises UsageError like ``check_arguments``.

    ``values`` are those of the injected parameters.
    """
    try:
        signature = from_function(name, function)
    except (TypeError, ValueError):
        return (), {}  # written in C, without a signature: called without arguments, may read sys.argv
    if signature.reads_argv:
        return (), {}
    if find_namespace(signature) and (module := _parse_module(function)):
        signature = with_namespace(signature, module)
    given: dict[str, object]
    if signature.namespace:
        from ddplaunch.system.target.namespace_options import fill_in, parse_namespace  # argparse, which few need

        namespace = parse_namespace(signature, words, inspect.unwrap(function).__globals__)
        fill_in(namespace, values)
        given = {signature.namespace: namespace}
    else:
        from ddplaunch.system.target.argument_parser import parse_arguments  # with click, which others do not need

        given = parse_arguments(signature, words, live=True)
    for parameter in signature.parameters:
        if parameter.injected:
            given[parameter.name] = injected_value(parameter, values, make_device)
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update(given)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _parse_module(function: Callable[..., Any]) -> ast.Module | None:
    """Parse the source file of a function; None if it cannot be read or parsed."""
    from ddplaunch.system.target.source import parse_file  # only for a parameter that may get a namespace

    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        return parse_file(code.co_filename if code else "")
    except UsageError:
        return None


def injected_value(parameter: Parameter, values: ArgumentValues, make_device: Callable[[str], object]) -> object:
    """Return the value of an injected parameter; a "device" of type str or int gets the name or the local rank."""
    name = INJECTED_PARAMETERS[parameter.name]
    if name != "device":
        return values[name]
    if parameter.value.kind == "str":
        return values["device"]
    if parameter.value.kind == "int":
        return values["local_rank"]
    return make_device(values["device"])
