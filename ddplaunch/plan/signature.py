"""What a function target takes, read from its source or, in a rank, from the function itself.

Holds the well-known parameter names and what a value may look like; turning arguments into values is left to
``agent/arguments.py``.
"""

from __future__ import annotations

import ast
import enum
import inspect
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

INJECTED = {
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
"""Parameter names that ddplaunch fills in, and which fact each receives."""

ValueKind = Literal["int", "float", "bool", "str", "path", "choice", "guess", "any"]


@dataclass(frozen=True)
class Value:
    """What one parameter accepts on the command line.

    ``guess``: neither annotated nor defaulted, so a number where it looks like one. ``any``: annotated with something
    that cannot be known here (from source) or cannot be typed on a command line (in a rank).
    """

    kind: ValueKind
    choices: tuple[str, ...] = ()
    many: bool = False
    convert: Callable[[Any], Any] | None = None  # live only: text of a choice to the member it names


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``shown`` is how the signature writes it ("lr: float = 0.1")."""

    name: str
    shown: str
    value: Value
    required: bool
    variadic: Literal["", "*", "**"] = ""

    @property
    def injected(self) -> bool:
        return self.name in INJECTED and not self.variadic


@dataclass(frozen=True)
class Signature:
    """A function's name as the user typed it and its parameters in order."""

    name: str
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return f"{self.name.rpartition(':')[2]}({', '.join(parameter.shown for parameter in self.parameters)})"

    @property
    def typed(self) -> tuple[Parameter, ...]:
        """The parameters that the command line fills, in order."""
        return tuple(parameter for parameter in self.parameters if not parameter.injected)


# ---------------------------------------------------------------------------------------------------- from source


def from_source(name: str, function: ast.FunctionDef, module: ast.Module) -> Signature:
    """Read the signature of ``function``, defined in ``module``; what a name there means is guessed from its spelling."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    parameters = [_read(argument, default, module) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(_variadic(arguments.vararg, "*", module))
    parameters += [
        _read(argument, default, module)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(_variadic(arguments.kwarg, "**", module))
    return Signature(name, tuple(parameters))


def _read(argument: ast.arg, default: ast.expr | None, module: ast.Module) -> Parameter:
    shown = argument.arg
    if argument.annotation:
        shown += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        shown += f" = {ast.unparse(default)}" if argument.annotation else f"={ast.unparse(default)}"
    if argument.annotation:
        value = _annotated(argument.annotation, module)
    elif default is None:
        value = Value("guess")
    else:
        value = _like(default.value) if isinstance(default, ast.Constant) else _like_expression(default)
    return Parameter(argument.arg, shown, value, required=default is None)


def _variadic(argument: ast.arg, stars: Literal["*", "**"], module: ast.Module) -> Parameter:
    annotated = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    value = _annotated(argument.annotation, module) if argument.annotation else Value("guess")
    return Parameter(argument.arg, f"{stars}{argument.arg}{annotated}", value, required=False, variadic=stars)


_SIMPLE: dict[str, ValueKind] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Path": "path",
    "PurePath": "path",
    "PathLike": "path",
}
_LISTS = {"list", "List", "Sequence", "Iterable", "tuple", "Tuple", "set", "Set"}


def _annotated(node: ast.expr, module: ast.Module) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _annotated(ast.parse(node.value, mode="eval").body, module)
        except SyntaxError:
            return Value("any")
    name = _last_name(node)
    if name in _SIMPLE:
        return Value(_SIMPLE[name])
    if name in _LISTS:
        return Value("guess", many=True)
    if isinstance(node, ast.Name):
        members = _enum_members(node.id, module)
        return Value("choice", choices=members) if members else Value("any")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _only_one([side for side in (node.left, node.right) if not _is_none(side)], module)
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        of = _last_name(node.value)
        if of == "Optional":
            return _annotated(inner[0], module)
        if of == "Union":
            return _only_one([side for side in inner if not _is_none(side)], module)
        if of == "Annotated":
            return _annotated(inner[0], module)
        if of == "Literal" and all(isinstance(item, ast.Constant) for item in inner):
            return Value("choice", choices=tuple(str(item.value) for item in inner if isinstance(item, ast.Constant)))
        if of in _LISTS:
            element = _annotated(inner[0], module)
            return Value("any") if element.many else replace(element, many=True)
    return Value("any")


def _only_one(sides: list[ast.expr], module: ast.Module) -> Value:
    return _annotated(sides[0], module) if len(sides) == 1 else Value("any")


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _enum_members(name: str, module: ast.Module) -> tuple[str, ...]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if not any(_last_name(base).endswith(("Enum", "Flag")) for base in node.bases):
                return ()
            return tuple(_assigned_names(node))
    return ()


def _assigned_names(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    yield target.id


def _like_expression(default: ast.expr) -> Value:
    if isinstance(default, ast.UnaryOp) and isinstance(default.operand, ast.Constant):
        return _like(default.operand.value)
    if isinstance(default, (ast.List, ast.Tuple)):
        return Value("guess", many=True)
    return Value("any")


def _like(default: object) -> Value:
    """What a parameter without an annotation accepts, by its default."""
    if isinstance(default, bool):
        return Value("bool")
    if isinstance(default, int):
        return Value("int")
    if isinstance(default, float):
        return Value("float")
    if isinstance(default, str):
        return Value("str")
    if isinstance(default, pathlib.PurePath):
        return Value("path")
    if isinstance(default, enum.Enum):
        return _live(type(default))
    if isinstance(default, (list, tuple)):
        return Value("guess", many=True)
    return Value("guess") if default is None else Value("any")


# ------------------------------------------------------------------------------------------------- from a function


def from_function(name: str, function: Callable[..., Any]) -> Signature:
    """Read the signature of a live function, decorators that keep ``__wrapped__`` seen through.

    Raises:
        TypeError, ValueError: it is not callable, or has no signature that Python can tell.
    """
    try:
        hints = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # an annotation that does not evaluate is no annotation
        hints = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not parameter.empty
        if parameter.name in hints:
            value = _live(hints[parameter.name])
        elif parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str):
            value = _live(parameter.annotation)
        else:
            value = _like(parameter.default) if has_default else Value("guess")
        stars: Literal["", "*", "**"] = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            stars = "*"
        elif parameter.kind is parameter.VAR_KEYWORD:
            stars = "**"
        parameters.append(Parameter(parameter.name, str(parameter), value, not (has_default or stars), stars))
    return Signature(name, tuple(parameters))


def _live(annotation: Any) -> Value:
    simple: dict[Any, ValueKind] = {int: "int", float: "float", bool: "bool", str: "str"}
    if annotation in simple:
        return Value(simple[annotation])
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        texts = {str(item): item for item in inner}
        return Value("choice", choices=tuple(texts), convert=texts.__getitem__)
    if origin is typing.Annotated:
        return _live(inner[0])
    if origin in (typing.Union, types.UnionType):
        left = [side for side in inner if side is not type(None)]
        return _live(left[0]) if len(left) == 1 else Value("any")
    if _is_list(origin or annotation):
        element = _live(inner[0]) if inner else Value("guess")
        return Value("any") if element.many else replace(element, many=True)
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            members = annotation.__members__
            return Value("choice", choices=tuple(members), convert=members.__getitem__)
        if issubclass(annotation, pathlib.PurePath):
            return Value("path", convert=annotation)
    return Value("any")


def _is_list(origin: Any) -> bool:
    import collections.abc as abc

    return origin in (list, tuple, set, abc.Sequence, abc.Iterable, abc.Collection)
