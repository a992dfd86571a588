"""Tests of size limits of the package: lengths of files and functions, imports inside functions."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import ddplaunch

PACKAGE = Path(ddplaunch.__file__).parent

LONGEST_FILE = 500
"""Lines of a file."""

SMALL, SMALL_FILES = 60, 46
"""A file below SMALL lines is small, and there may be SMALL_FILES beside the declarations."""

DECLARATIONS = ("__init__.py", "/feature.py", "/options.py")
"""The first page of a package, and what a feature declares: imported at every start, so the rest is elsewhere."""

LONG, LONG_FUNCTIONS = 60, 5
"""A function above LONG lines is long, and there may be LONG_FUNCTIONS."""

LOCAL_IMPORTS = 75
"""Import statements inside functions."""

REPEATED_NAMES = 10
"""Names that more than one class has."""

FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in FILES.items()}


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (name, node)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines(name: str) -> int:
    return FILES[name].count("\n")


def assert_at_most(limit: int, found: list[str]) -> None:
    """Fail, and name all that were found, where these are too many."""
    assert len(found) <= limit, f"{len(found)}, and {limit} are allowed:\n" + "\n".join(found)


def test_every_file_can_be_read_at_once():
    assert_at_most(0, [f"{name}: {lines(name)} lines" for name in FILES if lines(name) > LONGEST_FILE])


def test_few_files_are_small():
    assert_at_most(
        SMALL_FILES,
        [f"{name}: {lines(name)} lines" for name in FILES if lines(name) < SMALL and not name.endswith(DECLARATIONS)],
    )


def test_few_functions_are_long():
    taken = [(name, node.name, (node.end_lineno or 0) - node.lineno + 1) for name, node in functions()]
    assert_at_most(
        LONG_FUNCTIONS, [f"{name}: {function}: {count} lines" for name, function, count in taken if count > LONG]
    )


def test_few_imports_are_inside_functions():
    found = {
        id(node): f"{name}: {ast.unparse(node)}"
        for name, function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert_at_most(LOCAL_IMPORTS, list(found.values()))


def test_a_class_name_means_one_thing():
    named = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(name)
    assert_at_most(REPEATED_NAMES, [f"{name}: {', '.join(where)}" for name, where in named.items() if len(where) > 1])


def test_first_pages_name_what_need_not_be_read():
    """Each folder's ``__init__.py``: where a reader is, what may be changed there, and what can be left out."""
    pages = {name: ast.get_docstring(tree) or "" for name, tree in trees().items() if name.endswith("/__init__.py")}
    assert_at_most(0, [name for name, page in pages.items() if "need not be read" not in " ".join(page.split())])
