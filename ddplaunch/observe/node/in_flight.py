"""Reads the exception that a rank was handling at an inspection, if it propagates; ``rank/in_flight.py`` writes it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator

from ddplaunch.base.errors import sanitize_text
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.core.agent.rank_files import MAX_ERROR_FILE_BYTES


def read_handled_exception(path: str) -> tuple[str, str] | None:
    """Read message and traceback of the newest exception that a rank is handling and that will end its program.

    None if the rank handles no exception, or catches all that it handles.
    """
    try:
        for line in read_regular_file(path, MAX_ERROR_FILE_BYTES, follow_symlinks=False).splitlines():
            entry = json.loads(line)
            source = read_regular_file(entry["file"], MAX_ERROR_FILE_BYTES)
            if propagates(source.decode(errors="replace"), int(entry["line"])):
                return sanitize_text(str(entry["message"])), sanitize_text(str(entry["traceback"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SyntaxError):
        pass
    return None


def propagates(source: str, line: int) -> bool:
    """Whether an exception that is being handled at this line propagates to the callers.

    It does in a ``finally``, in an ``__exit__``, and in an ``except`` that raises further down; elsewhere it is caught.
    """
    found = [each for each in _list_handlers(ast.parse(source)) if each[0] <= line <= each[1]]
    return bool(found) and line <= min(found, key=lambda each: each[1] - each[0])[2]


def _list_handlers(tree: ast.AST) -> Iterator[tuple[int, int, int]]:
    """Yield first and last line of each exception handler, and the last line from which an exception propagates."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            last = node.items[-1].context_expr.end_lineno or node.lineno
            yield node.lineno, last, last
        elif isinstance(node, ast.ExceptHandler):
            raised = [each.lineno for each in ast.walk(node) if isinstance(each, ast.Raise)]
            yield node.lineno, node.end_lineno or node.lineno, max(raised, default=0)
        elif isinstance(node, ast.Try) and node.finalbody:
            last = node.finalbody[-1].end_lineno or node.finalbody[-1].lineno
            yield node.finalbody[0].lineno, last, last
