"""Runs a cell of a notebook in a rank."""

from __future__ import annotations

import ast
import sys


def run_cell(source: str, name: str) -> None:
    """Run a cell in this rank's ``__main__``, and print the value of its last expression, as a notebook does."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = sys.modules["__main__"].__dict__
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
        if value is not None:
            print(repr(value))
