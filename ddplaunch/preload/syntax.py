"""Questions about a syntax tree: what is below a node, what it is, whether it does more than name something."""

from __future__ import annotations

import _ast as ast
from collections.abc import Iterator

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")
IN_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """The node and all expressions below it; ``ast.walk`` would do, but takes longer to load than this to run."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        for name in reversed(node._fields):
            value = getattr(node, name, None)
            below = value if isinstance(value, list) else [value]
            todo += [each for each in reversed(below) if isinstance(each, ast.AST) and not isinstance(each, IN_BLOCKS)]


def targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> list[ast.expr]:
    todo = [*node.targets] if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    found: list[ast.expr] = []
    while todo:
        each = todo.pop(0)
        if isinstance(each, ast.Tuple | ast.List):
            todo = [*each.elts, *todo]
        else:
            found.append(each.value if isinstance(each, ast.Starred) else each)
    return found


def find_effect(node: Any) -> ast.stmt | ast.ExceptHandler | None:
    """Where a statement does more than name a constant or a function, if it does."""
    match node:
        case ast.Pass() | ast.Global() | ast.Nonlocal() | ast.Expr(value=ast.Constant()):
            return None
        case ast.Assign(value=value) if all(isinstance(each, ast.Name) for each in targets(node)):
            return None if _is_constant(value) else node
        case ast.AnnAssign(target=ast.Name(), value=value) if not has_call(node.annotation):
            return None if value is None or _is_constant(value) else node
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return node if has_call(node) else None
        case ast.ExceptHandler() | ast.match_case():
            return None
    return _catches_more(node) if hasattr(node, "handlers") else node


def _catches_more(node: ast.Try) -> ast.ExceptHandler | None:
    """The first clause for what is not an error of an import."""
    for handler in node.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not all(getattr(kind, "id", None) in _IMPORT_ERRORS for kind in kinds):
            return handler
    return None


def has_call(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in walk(node))


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_constant(key) for key in node.keys) and all(map(_is_constant, node.values))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left) and _is_constant(node.right)
    return isinstance(node, ast.Constant | ast.Name)


def is_main(test: ast.expr) -> bool:
    """Whether it is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    return getattr(test.left, "id", None) == "__name__" and as_text(test.comparators[0]) == "__main__"


def as_text(node: ast.AST | None = None, *_: object) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
