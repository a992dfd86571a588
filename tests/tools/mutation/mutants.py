"""Small faults that a line of source may get: another comparison, a wrong number, a call that is left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


class Mutant(NamedTuple):
    """One fault: the text between two offsets of a file is replaced."""

    line: int
    start: int  # characters from the start of the file
    end: int
    text: str
    what: str

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        return source[: self.start] + self.text + source[self.end :]


def list_mutants(source: str) -> list[Mutant]:
    """Return the faults that this source may get, by line; none in annotations, docstrings and type checks."""
    return sorted(set(_Finder(source).find()))


class _Finder:
    def __init__(self, source: str) -> None:
        self._source, self._tree = source, ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()

    def find(self) -> Iterator[Mutant]:
        """Yield the faults of all nodes."""
        yield from self._visit(self._tree)

    def _visit(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        yield from self._of_node(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    yield from self._visit(child)

    def _of_node(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield self._between(left, right, f" {_COMPARISONS[type(op)]} ", "comparison")
            case ast.BoolOp(op=op, values=[first, second, *_]):
                yield self._between(first, second, " or " if isinstance(op, ast.And) else " and ", "and, or")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, f"({self._text(operand)})", "not is left out")
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                yield self._between(left, right, " - " if isinstance(op, ast.Add) else " + ", "plus, minus")
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value), "True, False")
            case ast.Constant(value=int() as value):
                yield self._replace(node, str(value + 1), "number")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield self._replace(test, f"(not ({self._text(test)}))", "condition")
            case ast.Return(value=ast.expr() as value) if not _is_constant(value):
                yield self._replace(value, "None", "result")
            case ast.Expr(value=ast.Call()):
                yield self._replace(node, "pass", "call is left out")
            case ast.Continue():
                yield self._replace(node, "break", "continue, break")
            case ast.Break():
                yield self._replace(node, "continue", "continue, break")
            case _:
                return

    def _offset(self, line: int, column: int) -> int:
        """The offset of a character; ``column``: bytes of UTF-8, as ast counts."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _replace(self, node: ast.expr | ast.stmt, text: str, what: str) -> Mutant:
        return Mutant(node.lineno, *self._span(node), text, what)

    def _between(self, left: ast.expr, right: ast.expr, text: str, what: str) -> Mutant:
        """Replace the operator between two operands, with parentheses that stand there kept."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end]
        before, after = between[: len(between) - len(between.lstrip(" )\n"))], between[len(between.rstrip(" (\n")) :]
        return Mutant(left.lineno, start, end, f"{before}{text}{after}", what)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
