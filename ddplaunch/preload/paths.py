"""Folders that a program's source shows without being run: constants, and what is built from ``__file__``."""

from __future__ import annotations

import _ast as ast
import os

_SAME = frozenset({"str", "fspath", "Path", "PurePath", "PosixPath", "resolve", "absolute", "as_posix"})
_OF_ONE = frozenset({"dirname", "abspath", "realpath", "normpath", "expanduser"})
_DEEP = 12  # expressions in expressions


class Paths:
    """Those in one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.named: dict[str, ast.expr | None] = {}  # None for a name that is given twice

    def learn(self, body: list[ast.stmt]) -> None:
        """Note the names that are given once, at the top of the file."""
        for node in body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self.named[name] = None if name in self.named else node.value

    def value(self, node: ast.AST | None) -> str | None:
        """The path that an expression gives, made absolute; None where the source does not show it."""
        found = self._value(node, 0)
        return None if found is None else os.path.abspath(found)

    def _value(self, node: ast.AST | None, deep: int) -> str | None:
        if deep > _DEEP:
            return None
        deep += 1
        match node:
            case ast.Constant(value=str(text)) if "\0" not in text:
                return text
            case ast.Name(id=name):
                return self._file if name == "__file__" else self._value(self.named.get(name), deep)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return _join([self._value(left, deep), self._value(right, deep)])
            case ast.Attribute(value=value, attr="parent"):
                return _parent(self._value(value, deep), 1)
            case ast.Subscript(value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(number))):
                return _parent(self._value(value, deep), number + 1) if 0 <= number < _DEEP else None
            case ast.Call(keywords=[]):
                return self._call(node, deep)
        return None

    def _call(self, node: ast.Call, deep: int) -> str | None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [self._value(each, deep) for each in node.args]
        if name in ("getcwd", "cwd") and not given:
            return os.getcwd()
        if name in _SAME and not given and isinstance(node.func, ast.Attribute):  # Path(…).resolve()
            found = self._value(node.func.value, deep)
            return found and (os.path.realpath(found) if name == "resolve" else os.path.abspath(found))
        if name == "join" or (name in _SAME and given):
            return _join(given)
        if len(given) == 1 and given[0] is not None and name in _OF_ONE:
            return str(getattr(os.path, name)(given[0]))
        return None


def _parent(path: str | None, count: int) -> str | None:
    for _ in range(count):
        path = None if path is None else os.path.dirname(os.path.abspath(path))
    return path


def _join(parts: list[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return os.path.join(*known) if known and len(known) == len(parts) else None
