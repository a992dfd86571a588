"""Evaluates path expressions in source without running it: constants, and what is built from ``__file__``."""

from __future__ import annotations

import _ast as ast
import os

from ddplaunch.base.safe_files import current_folder

_IDENTITY_CALLS = frozenset({"str", "fspath", "Path", "PurePath", "PosixPath", "absolute", "as_posix", "join"})
_SINGLE_PATH_CALLS = frozenset({"dirname", "abspath", "realpath", "normpath", "expanduser"})
_MAX_DEPTH = 12  # of nested expressions


class PathExpressions:
    """The path expressions of one file; ``named``: the values of its module-level names, None if assigned twice."""

    def __init__(self, file: str, body: list[ast.stmt]) -> None:
        self._file = file
        self.named: dict[str, ast.expr | None] = {}
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.named[name] = None if name in self.named else value

    def evaluate(self, node: ast.AST | None) -> str | None:
        """Return the absolute path that an expression evaluates to; None if the source does not show it."""
        path = self._value(node, 0)
        return None if path is None else os.path.abspath(path)

    def _value(self, node: ast.AST | None, deep: int) -> str | None:
        if deep > _MAX_DEPTH:
            return None
        deep += 1
        match node:
            case ast.Constant(value=str(text)) if "\0" not in text:
                return text
            case ast.Name(id=name):
                return self._file if name == "__file__" else self._value(self.named.get(name), deep)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._join([left, right], deep)
            case ast.Attribute(value=value, attr="parent"):
                return self._parent_path(value, 1, deep)
            case ast.Subscript(value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(number))):
                return self._parent_path(value, number + 1, deep)
            case ast.Call(func=ast.Name("getcwd") | ast.Attribute(attr="getcwd" | "cwd"), args=[], keywords=[]):
                return current_folder()
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):  # Path(…).resolve()
                path = self._value(value, deep) if name in ("resolve", *_IDENTITY_CALLS) else None
                return os.path.realpath(path) if path and name == "resolve" else path
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=args, keywords=[]):
                path = (
                    self._join(args, deep)
                    if name in _IDENTITY_CALLS or (len(args) == 1 and name in _SINGLE_PATH_CALLS)
                    else None
                )
                return str(getattr(os.path, name)(path)) if path and name in _SINGLE_PATH_CALLS else path
        return None

    def _parent_path(self, node: ast.AST, count: int, deep: int) -> str | None:
        path = self._value(node, deep)
        return os.path.normpath(os.path.join(current_folder(), path, *[".."] * count)) if path and count > 0 else None

    def _join(self, nodes: list[ast.expr], deep: int) -> str | None:
        known = [path for each in nodes if (path := self._value(each, deep)) is not None]
        return os.path.join(*known) if known and len(known) == len(nodes) else None
