"""A function target's arguments: ``--name value`` words into its parameters, with click.

The same code checks them before anything starts, against the signature read from the source, and converts them in the
rank, against the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.errors import UsageError
from ddplaunch.plan.signature import INJECTED, Parameter, Signature, from_function

if TYPE_CHECKING:
    import click


def check(signature: Signature, words: tuple[str, ...]) -> None:
    """Check ``words`` against a signature.

    Raises:
        UsageError: one is missing, unknown or of the wrong kind; the hint is the signature.
    """
    if signature.parameters:
        _parse(signature, words)


def bind(
    name: str, function: Callable[..., Any], words: tuple[str, ...], facts: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments to call ``function`` with.

    Args:
        facts: the values behind the well-known names; "device" as torch names it.

    Raises:
        UsageError: as for ``check``.
    """
    try:
        signature = from_function(name, function)
    except (TypeError, ValueError):
        return [], {}  # made in C, without a signature: it gets nothing and may read sys.argv
    if not signature.parameters:
        return [], {}
    given = _parse(signature, words)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    kinds = _positional_only(function)
    for parameter in signature.parameters:
        if parameter.injected:
            value = _fact(parameter, facts, function)
        elif parameter.variadic == "*":
            positional.extend(given.get(parameter.name, ()))
            continue
        elif parameter.name in given:
            value = given[parameter.name]
        else:
            continue
        if parameter.name in kinds:
            positional.append(value)
        else:
            named[parameter.name] = value
    return positional, named


def _positional_only(function: Callable[..., Any]) -> set[str]:
    """Names that must be passed by position: those marked so, and all before a ``*args`` that receives something."""
    import inspect

    parameters = list(inspect.signature(function).parameters.values())
    starred = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return {
        each.name
        for each in parameters
        if each.kind is each.POSITIONAL_ONLY or (starred and each.kind is each.POSITIONAL_OR_KEYWORD)
    }


def _fact(parameter: Parameter, facts: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    fact = INJECTED[parameter.name]
    if fact != "device":
        return facts[fact]
    if parameter.value.kind == "str":
        return facts["device"]
    if parameter.value.kind == "int":
        return facts["local_rank"]
    import torch

    return torch.device(facts["device"])


def _parse(signature: Signature, words: tuple[str, ...]) -> dict[str, Any]:
    """Convert ``words``; only what was given is in the result, so that the function's own defaults serve for the rest."""
    import click

    command = click.Command(
        str(signature),
        params=[_option(parameter) for parameter in signature.typed if parameter.variadic != "**"],
        add_help_option=False,
    )
    try:
        context = command.make_context(signature.name, list(words))
    except click.ClickException as error:
        raise UsageError(f"{signature.name}: {_message(error)}", f"its signature: {signature}") from None
    except click.exceptions.Exit:
        raise UsageError(f"{signature.name} takes {signature}") from None
    given = {}
    missing = []
    for parameter in signature.typed:
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            given[parameter.name] = _converted(parameter, context.params[parameter.name])
        elif parameter.required:
            missing.append(f"--{parameter.name}")
    if missing:
        needs = " and ".join([", ".join(missing[:-1]), missing[-1]] if len(missing) > 1 else missing)
        raise UsageError(f"{signature.name} needs {needs}", f"its signature: {signature}")
    return given


def _message(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _option(parameter: Parameter) -> click.Parameter:
    import click

    if parameter.variadic == "*":
        return click.Argument([parameter.name], nargs=-1, required=False, type=_type(parameter))
    spellings = list(dict.fromkeys([parameter.name, parameter.name.replace("_", "-")]))
    if parameter.value.kind == "bool" and not parameter.value.many:
        names = [f"--{name}/--no-{name}" for name in spellings]
        return click.Option([*names, parameter.name], default=None)
    return click.Option(
        [*(f"--{name}" for name in spellings), parameter.name],
        type=_type(parameter),
        multiple=parameter.value.many,
        default=None,
    )


def _type(parameter: Parameter) -> click.ParamType[Any]:
    import click

    kind = parameter.value.kind
    if kind == "choice":
        return click.Choice(parameter.value.choices)
    types: dict[str, click.ParamType[Any]] = {"int": click.INT, "float": click.FLOAT, "bool": click.BOOL}
    return types.get(kind, click.STRING)


def _converted(parameter: Parameter, value: Any) -> Any:
    if parameter.value.many or parameter.variadic:
        return [_one(parameter, each) for each in value]
    return _one(parameter, value)


def _one(parameter: Parameter, value: Any) -> Any:
    if parameter.value.convert is not None:
        return parameter.value.convert(value)
    if parameter.value.kind == "guess":
        return _guessed(value)
    return value


def _guessed(text: str) -> Any:
    """A number where it looks like one, for a parameter that says nothing of its type."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
