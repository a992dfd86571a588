"""Folders that a program's source shows without being run: constants, and what is built from ``__file__``."""

from __future__ import annotations

import _ast as ast
import os

_SAME = frozenset({"str", "fspath", "Path", "PurePath", "PosixPath", "resolve", "absolute", "as_posix"})
_DEEP = 12  # expressions in expressions


class Paths:
    """Those in one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._named: dict[str, ast.expr | None] = {}  # None for a name that is given twice

    def learn(self, body: list[ast.stmt]) -> None:
        """Note the names that are given once, at the top of the file."""
        for node in body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self._named[name] = None if name in self._named else node.value

    def value(self, node: ast.AST | None) -> str | None:
        """The path that an expression gives, made absolute; None where the source does not show it."""
        found = self._value(node, 0)
        return None if found is None else os.path.abspath(found)

    def _value(self, node: ast.AST | None, deep: int) -> str | None:
        if deep > _DEEP:
            return None
        deep += 1
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) and "\0" not in node.value else None
        if isinstance(node, ast.Name):
            return self._file if node.id == "__file__" else self._value(self._named.get(node.id), deep)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return _join([self._value(node.left, deep), self._value(node.right, deep)])
        if isinstance(node, ast.Attribute) and node.attr == "parent":
            return _parent(self._value(node.value, deep))
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "parents":
            found, number = self._value(node.value.value, deep), getattr(node.slice, "value", None)  # type: ignore[attr-defined]
            for _ in range(number + 1 if isinstance(number, int) and 0 <= number < _DEEP else 0):
                found = _parent(found)
            return found if isinstance(number, int) and 0 <= number < _DEEP else None
        return self._call(node, deep) if isinstance(node, ast.Call) else None

    def _call(self, node: ast.Call, deep: int) -> str | None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if node.keywords:
            return None
        given = [self._value(each, deep) for each in node.args]
        if name in ("getcwd", "cwd") and not given:
            return os.getcwd()
        if name in _SAME and not given and isinstance(node.func, ast.Attribute):  # Path(…).resolve()
            found = self._value(node.func.value, deep)
            return found and (os.path.realpath(found) if name == "resolve" else os.path.abspath(found))
        if name == "join" or (name in _SAME and given):
            return _join(given)
        if len(given) == 1 and given[0] is not None:
            if name == "dirname":
                return os.path.dirname(given[0])
            if name in ("abspath", "realpath", "normpath", "expanduser"):
                found = getattr(os.path, name)(given[0])
                return found if isinstance(found, str) else None
        return None


def _parent(path: str | None) -> str | None:
    return None if path is None else os.path.dirname(os.path.abspath(path))


def _join(parts: list[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return os.path.join(*known) if known and len(known) == len(parts) else None
