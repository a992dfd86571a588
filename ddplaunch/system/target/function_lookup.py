"""Finds a function in the source of a module, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddplaunch.base.errors import UsageError, truncate_line
from ddplaunch.base.text import closest_match
from ddplaunch.system.target import signature
from ddplaunch.system.target.signature import Signature


def find_function(typed: str, where: str, function: str, module: ast.Module) -> Signature | None:
    """Return the signature of ``function`` in ``module``; None if only running the module can show it.

    ``where`` is the part of ``typed`` before the colon: the module as the user wrote it.
    Raises UsageError if the source shows that the function does not exist or is something else.
    """
    names = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if not all(part.isidentifier() for part in function.split(".")):
        example = f"{where}:{names[0]}" if names else f"{where}:main"
        raise UsageError(f"{function!r} is not a function name", f"write it like {example}")
    name, _, attribute = function.partition(".")
    bindings = [node for node in _list_top_level_statements(module) if name in _list_bound_names(node)]
    if not bindings:
        if "__getattr__" in names or any("*" in _list_bound_names(node) for node in _list_top_level_statements(module)):
            return None
        raise UsageError(f"{where} has no function {function}", _suggest_functions(where, function, names))
    node = bindings[-1]
    if attribute:
        return None
    if isinstance(node, ast.AsyncFunctionDef):
        raise UsageError(f"{typed} is a coroutine function", "wrap it in a function that calls asyncio.run")
    if isinstance(node, ast.ClassDef):
        raise UsageError(f"{typed} is a class, not a function", _suggest_functions(where, function, names))
    if isinstance(node, (ast.Import, ast.Assign, ast.AnnAssign)) and (what := _non_function_statement(node)):
        hint = _suggest_functions(where, function, names)
        raise UsageError(f"{typed} is not a function: {truncate_line(what, 60)}", hint)
    if len(bindings) == 1 and isinstance(node, ast.FunctionDef) and not node.decorator_list and node in module.body:
        return signature.from_source(typed, node, module)
    return None


def _suggest_functions(where: str, function: str, names: list[str]) -> str | None:
    if near := closest_match(function, names):
        return f"did you mean {where}:{near}?"
    return f"its functions: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}" if names else None


def _non_function_statement(node: ast.Import | ast.Assign | ast.AnnAssign) -> str | None:
    """Return the source of a statement that certainly binds a module or a plain value, not a function; else None."""
    plain = (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set, ast.JoinedStr)
    if isinstance(node, ast.Import) or (isinstance(node.value, plain) and len(_list_bound_names(node)) == 1):
        return ast.unparse(node)
    return None


def _list_top_level_statements(module: ast.Module) -> Iterator[ast.AST]:
    """Iterate over all statements in the module's namespace, including those in its if, try, with and for blocks."""
    todo: list[ast.AST] = list(module.body)
    while todo:
        node = todo.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
            todo[:0] = [child for child in ast.iter_child_nodes(node) if isinstance(child, inner)]


def _list_bound_names(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, without those in its blocks; "*" for a star import."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars]
    elif isinstance(node, ast.Expr):
        targets = [each.target for each in ast.walk(node) if isinstance(each, ast.NamedExpr)]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
