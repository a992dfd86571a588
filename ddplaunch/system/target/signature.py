"""The signature of a function target, read from its source or, in a rank, from the function object.

Holds the well-known parameter names and what a value may look like; turning arguments into values is left to
``system/target/arguments.py``.
"""

from __future__ import annotations

import ast
import enum
import inspect
import os
import pathlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypedDict


class ArgumentValues(TypedDict):
    """The values of injected parameters: the place of the rank in the job, and torch's name of its device."""

    rank: int
    local_rank: int
    node_rank: int
    nnodes: int
    world_size: int
    local_world_size: int
    device: str


ArgumentName = Literal["rank", "local_rank", "node_rank", "nnodes", "world_size", "local_world_size", "device"]

INJECTED_PARAMETERS: dict[str, ArgumentName] = {
    "rank": "rank",
    "global_rank": "rank",
    "local_rank": "local_rank",
    "gpu": "local_rank",
    "gpu_id": "local_rank",
    "world_size": "world_size",
    "local_world_size": "local_world_size",
    "world_size_per_node": "local_world_size",
    "node_rank": "node_rank",
    "nnodes": "nnodes",
    "device": "device",
}
"""Injected parameters: names that ddplaunch fills in, and the value that each receives."""

ValueKind = Literal["int", "float", "bool", "str", "path", "choice", "number", "union", "any"]
Stars = Literal["", "*", "**"]
Container = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Value:
    """The values that a parameter accepts on the command line.

    A "union" is the first of ``sides`` that fits. "any" is a type that the source does not show, or, in a rank, a type
    that cannot be typed on a command line.
    """

    kind: ValueKind
    choices: tuple[str, ...] = ()
    sides: tuple[Value, ...] = ()
    container: Container | None = None  # collects the values of a repeated option; None for a single value
    length: int | None = None  # number of values, if fixed, as for `tuple[int, int]`
    convert: Callable[[str], Any] | None = None  # in a rank only: makes the value from its text (a choice, a path)


NUMBER_OR_TEXT = Value("union", sides=(Value("number"), Value("str")))
"""For a parameter without a type: a number if it looks like one, else text."""


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``text`` is its source in the signature ("lr: float = 0.1")."""

    name: str
    text: str
    value: Value
    required: bool
    stars: Stars = ""

    @property
    def injected(self) -> bool:
        return self.name in INJECTED_PARAMETERS and not self.stars


@dataclass(frozen=True)
class Signature:
    """A function's name as the user typed it and its parameters in order."""

    name: str
    parameters: tuple[Parameter, ...]
    doc: str | None = None  # its docstring, where the source has one
    namespace: str | None = None  # the parameter that gets an argparse.Namespace
    option_calls: tuple[ast.Call, ...] = ()  # of ``add_argument`` in its module: the options of that namespace

    def __str__(self) -> str:
        return f"{self.name.rpartition(':')[2]}({', '.join(parameter.text for parameter in self.parameters)})"

    @property
    def typed(self) -> tuple[Parameter, ...]:
        """The parameters that get their values from the command line, in order."""
        return tuple(parameter for parameter in self.parameters if not parameter.injected)

    @property
    def reads_argv(self) -> bool:
        """Whether the function is called without arguments and reads ``sys.argv``: it has no parameters.

        A function of only ``*args, **kwargs`` counts as one without: click's commands and careless decorators look so.
        So does a function to which a decorator passes arguments that it reads itself.
        """
        return [parameter.stars for parameter in self.parameters] in ([], ["*", "**"])


# ---------------------------------------------------------------------------------------------------- from source


def from_source(name: str, function: ast.FunctionDef, module: ast.Module) -> Signature:
    """Read the signature of ``function`` in ``module``; types are guessed from the spelling of their names."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = [_read(each, default, module) for each, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(_read(arguments.vararg, None, module, "*"))
    parameters += [_read(each, default, module) for each, default in named]
    if arguments.kwarg:
        parameters.append(_read(arguments.kwarg, None, module, "**"))
    return with_namespace(Signature(name, tuple(parameters), ast.get_docstring(function)), module)


_NAMESPACE_NAMES = frozenset(
    {"args", "arguments", "opt", "opts", "options", "cfg", "conf", "config", "params", "hparams"}
)


def find_namespace(signature: Signature) -> str | None:
    """Return the parameter that may get an ``argparse.Namespace``: the only one without a default, by name or type."""
    required = [each for each in signature.typed if each.required or each.stars]
    if len(required) != 1 or required[0].stars:
        return None
    annotation = required[0].text.partition(":")[2].strip(" '\"")
    is_namespace = annotation.endswith("Namespace") if annotation else required[0].name in _NAMESPACE_NAMES
    return required[0].name if is_namespace else None


def with_namespace(signature: Signature, module: ast.Module) -> Signature:
    """Return the signature with the options of the module's ``ArgumentParser``, if a parameter gets its namespace."""
    name = find_namespace(signature)
    calls = [
        node
        for node in (ast.walk(module) if name else ())
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and node.args
    ]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return replace(signature, namespace=name, option_calls=tuple(calls)) if calls else signature


def _read(argument: ast.arg, default: ast.expr | None, module: ast.Module, stars: Stars = "") -> Parameter:
    text = f"{stars}{argument.arg}"
    if argument.annotation:
        text += f": {ast.unparse(argument.annotation)}"
        value = _value_from_annotation(argument.annotation, module)
    else:
        value = NUMBER_OR_TEXT if default is None else _value_from_default_source(default, module)
    if default is not None:
        text += f" = {ast.unparse(default)}" if argument.annotation else f"={ast.unparse(default)}"
    return Parameter(argument.arg, text, value, default is None and not stars, stars)


_SIMPLE: dict[str, Value] = {
    "int": Value("int"),
    "float": Value("float"),
    "bool": Value("bool"),
    "str": Value("str"),
    "Path": Value("path", convert=pathlib.Path),
    "PurePath": Value("path", convert=pathlib.PurePath),
    "PathLike": Value("path", convert=pathlib.Path),
    "Any": NUMBER_OR_TEXT,
    "object": NUMBER_OR_TEXT,
}

_CONTAINERS: dict[str, Container] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset)},
    **{"List": list, "Tuple": tuple, "Set": set, "FrozenSet": frozenset},
    **dict.fromkeys(("Sequence", "Iterable", "Collection"), list),
}


def _value_from_annotation(node: ast.expr, module: ast.Module | None) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _value_from_annotation(ast.parse(node.value, mode="eval").body, module)
        except SyntaxError:
            return Value("any")
    name = _last_name(node)
    if name in _SIMPLE:
        return _SIMPLE[name]
    if name in _CONTAINERS:
        return replace(NUMBER_OR_TEXT, container=_CONTAINERS[name])
    if isinstance(node, ast.Name):
        members = _enum_members(node.id, module)
        return Value("choice", choices=members) if members else Value("any")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_value_from_annotation(side, module) for side in (node.left, node.right) if not _is_none(side)])
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        of = _last_name(node.value)
        if of in ("Optional", "Annotated"):
            return _value_from_annotation(inner[0], module)
        if of == "Union":
            return _union([_value_from_annotation(side, module) for side in inner if not _is_none(side)])
        if of == "Literal" and all(isinstance(item, ast.Constant) for item in inner):
            return Value("choice", choices=tuple(str(item.value) for item in inner if isinstance(item, ast.Constant)))
        if of == "PathLike":
            return _SIMPLE[of]
        if of in _CONTAINERS:
            kinds = [item for item in inner if not (isinstance(item, ast.Constant) and item.value is ...)]
            values = [_value_from_annotation(item, module) for item in kinds]
            return _container(_CONTAINERS[of], values, open_ended=len(kinds) < len(inner))
    return Value("any")


def _union(sides: list[Value]) -> Value:
    """Return the value of a union, whose types are tried from the narrowest on; "any" for one with flags or lists."""
    if len(sides) == 1:
        return sides[0]
    flat = [each for side in sides for each in (side.sides or (side,))]
    if any(side.container for side in sides) or not all(each.kind in _NARROWEST_FIRST for each in flat):
        return Value("any")
    return Value("union", sides=tuple(sorted(flat, key=lambda each: _NARROWEST_FIRST.index(each.kind))))


_NARROWEST_FIRST = ("choice", "int", "number", "float", "path", "str")


def _container(container: Container, inner: list[Value], *, open_ended: bool) -> Value:
    length = len(inner) if container is tuple and inner and not open_ended else None
    if len(set(inner)) > 1 or any(each.container or each.kind == "any" for each in inner):
        return Value("any")
    return replace(inner[0] if inner else NUMBER_OR_TEXT, container=container, length=length)


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _enum_members(name: str, module: ast.Module | None) -> tuple[str, ...]:
    for node in module.body if module else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            if not any(_last_name(base).endswith(("Enum", "Flag")) for base in node.bases):
                return ()
            targets = [statement.targets for statement in node.body if isinstance(statement, ast.Assign)]
            names = [each.id for each in chain(*targets) if isinstance(each, ast.Name)]
            return tuple(name for name in names if not name.startswith("_"))
    return ()


def _value_from_default_source(default: ast.expr, module: ast.Module) -> Value:
    """Return the value of a parameter without an annotation, from the source of its default."""
    if isinstance(default, ast.UnaryOp):
        default = default.operand
    if isinstance(default, ast.Constant):
        return _value_from_default(default.value)
    if isinstance(default, (ast.List, ast.Tuple)):
        return replace(NUMBER_OR_TEXT, container=list if isinstance(default, ast.List) else tuple)
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        members = _enum_members(default.value.id, module)
        return Value("choice", choices=members) if members else Value("any")
    return Value("any")


# ------------------------------------------------------------------------------------------------- from a function


def from_function(name: str, function: Callable[..., Any]) -> Signature:
    """Read the signature of a function object, looking through decorators that set ``__wrapped__``.

    Raises TypeError or ValueError if it is not callable, or has no signature that Python can determine.
    """
    if _supplies_own_arguments(function):
        return Signature(name, ())
    try:
        hints = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # if one annotation cannot be evaluated, all are read by their spelling
        hints = {}
    parameters = inspect.signature(function).parameters.values()
    return Signature(name, tuple(_read_live_parameter(each, hints.get(each.name)) for each in parameters))


def _supplies_own_arguments(function: Callable[..., Any]) -> bool:
    """Whether a decorator reads the arguments itself, like ``hydra.main``, and needs none in the call."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return False
    own = inspect.signature(function, follow_wrapped=False).parameters
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(each.kind in stars or each.default is each.empty for each in own.values()):
        return False
    return own.keys().isdisjoint(inspect.signature(wrapped).parameters)


def _read_live_parameter(parameter: inspect.Parameter, hint: Any) -> Parameter:
    has_default = parameter.default is not parameter.empty
    if hint is None and parameter.annotation is not parameter.empty:
        hint = parameter.annotation
    if isinstance(hint, str):
        value = _value_from_annotation(ast.Constant(hint), None)
    elif hint is not None:
        value = _value_from_live_annotation(hint)
    else:
        value = _value_from_default(parameter.default) if has_default else NUMBER_OR_TEXT
    starred: dict[Any, Stars] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    stars = starred.get(parameter.kind, "")
    return Parameter(parameter.name, str(parameter), value, not (has_default or stars), stars)


def _value_from_live_annotation(annotation: Any) -> Value:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _value_from_live_annotation(inner[0])
    if origin in (typing.Union, types.UnionType):
        return _union([_value_from_live_annotation(side) for side in inner if side is not type(None)])
    if origin is Literal:
        members = {str(item): item for item in inner}
        return Value("choice", choices=tuple(members), convert=members.__getitem__)
    if annotation is Any:
        return NUMBER_OR_TEXT
    kind = origin or annotation
    if not isinstance(kind, type):
        return Value("any")
    if kind in _LIVE_CONTAINERS:
        values = [_value_from_live_annotation(item) for item in inner if item is not ...]
        return _container(_LIVE_CONTAINERS[kind], values, open_ended=... in inner)
    if kind in (int, float, bool, str, object):
        return _SIMPLE[kind.__name__]
    if issubclass(kind, enum.Enum):
        return Value("choice", choices=tuple(kind.__members__), convert=kind.__members__.__getitem__)
    if issubclass(kind, pathlib.PurePath):
        return Value("path", convert=kind)
    return _SIMPLE["PathLike"] if kind is os.PathLike else Value("any")


_LIVE_CONTAINERS: dict[type, Container] = {
    **{kind: kind for kind in (list, tuple, set, frozenset)},
    **dict.fromkeys((Sequence, Iterable, Collection), list),
}


def _value_from_default(default: object) -> Value:
    """Return the value of a parameter without an annotation, from its default."""
    if isinstance(default, enum.Enum):
        return _value_from_live_annotation(type(default))
    for kind in (bool, int, float, str):  # a bool is an int as well
        if isinstance(default, kind):
            return _SIMPLE[kind.__name__]
    if isinstance(default, pathlib.PurePath):
        return Value("path", convert=type(default))
    if isinstance(default, (list, tuple)):
        return replace(NUMBER_OR_TEXT, container=type(default) if type(default) in (list, tuple) else list)
    return NUMBER_OR_TEXT if default is None else Value("any")
