"""A parameter that gets an ``argparse.Namespace``, as tutorials of ``mp.spawn`` pass one: ``train(rank, args)``.

Its options are the calls of ``add_argument`` in the function's module. They are read from the source, as the code that
makes the parser is in a block that is not run here. The launcher checks words against literal values only, and not at
all where an option's name, action or number of values is no literal; a rank evaluates them with the module's names.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.signature import INJECTED_PARAMETERS, ArgumentValues, Signature

_LITERAL_NAMES: dict[str, object] = {"int": int, "float": float, "str": str}


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _ArgparseError(message)


class _ArgparseError(Exception):
    pass


def check_namespace(signature: Signature, words: Sequence[str]) -> None:
    """Check ``words`` in the launcher, if the source alone says what options there are. Raises UsageError."""
    if all(map(_is_literal, signature.option_calls)):
        parse_namespace(signature, words, None)


def parse_namespace(signature: Signature, words: Sequence[str], names: Mapping[str, Any] | None) -> argparse.Namespace:
    """Parse ``words``; ``names``: the module's globals, in a rank. Raises UsageError as ``parse_arguments`` does."""
    try:
        return build_parser(signature, names).parse_args(list(words))
    except _ArgparseError as error:
        raise UsageError(f"{signature.name}: {error}", _options_hint(signature, names)) from None


def build_parser(signature: Signature, names: Mapping[str, Any] | None) -> argparse.ArgumentParser:
    """Build a parser from the module's ``add_argument`` calls; options that ddplaunch fills in are optional."""
    parser = _RaisingParser(prog=signature.name, add_help=False, conflict_handler="resolve")
    for call in signature.option_calls:
        spellings = _spellings(call, names)
        if not spellings:
            continue
        settings = {each.arg: each.value for each in call.keywords if each.arg and each.arg != "help"}
        evaluated, unknown = dict[str, Any](), set[str]()
        for name, node in settings.items():
            try:
                evaluated[name] = _evaluate(node, names)
            except Exception:  # a name of the function that makes the parser
                unknown.add(name)
        if "default" in unknown and names is not None and spellings[0].startswith("-"):
            evaluated["required"] = True
        if _is_injected(spellings, evaluated):
            evaluated |= {"required": False} if spellings[0].startswith("-") else {"nargs": "?"}
        try:
            parser.add_argument(*spellings, **evaluated)
        except (TypeError, ValueError):  # of an action or a type that cannot be known here
            parser.add_argument(*spellings)
    return parser


def fill_in(namespace: argparse.Namespace, values: ArgumentValues) -> None:
    """Set the attributes that ddplaunch supplies, like the rank and the world size, in the namespace."""
    for name, value in INJECTED_PARAMETERS.items():
        if value != "device":
            setattr(namespace, name, values[value])


def _is_literal(call: ast.Call) -> bool:
    """Whether the source alone says the names of an option and how many values it takes."""
    settings = [each.value for each in call.keywords if each.arg in (None, "action", "nargs")]  # None is **settings
    return all(isinstance(each, ast.Constant) for each in (*call.args, *settings))


def _spellings(call: ast.Call, names: Mapping[str, Any] | None) -> list[str]:
    """Return the names of an option, without names that only the function that makes the parser knows."""
    spellings = list[str]()
    for node in call.args:
        with suppress(Exception):
            if isinstance(name := _evaluate(node, names), str):
                spellings.append(name)
    return spellings


def _is_injected(spellings: Sequence[str], settings: Mapping[str, Any]) -> bool:
    longest = max(spellings, key=len).lstrip("-").replace("-", "_")
    return settings.get("dest", longest) in INJECTED_PARAMETERS


def _evaluate(node: ast.expr, names: Mapping[str, Any] | None) -> Any:
    if names is not None:
        return eval(compile(ast.Expression(node), "<add_argument>", "eval"), dict(names))
    if isinstance(node, ast.Name) and node.id in _LITERAL_NAMES:
        return _LITERAL_NAMES[node.id]
    return ast.literal_eval(node)


def _options_hint(signature: Signature, names: Mapping[str, Any] | None) -> str:
    options = [name for call in signature.option_calls for name in _spellings(call, names)[:1]]
    return f"its options: {', '.join(options)}"
