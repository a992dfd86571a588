"""Helpers for syntax trees: child nodes, side effects, and the sensitive names, which decide about later imports."""

from __future__ import annotations

import _ast as ast
from collections.abc import Iterator
from typing import Any

BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")
_IN_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_NAMES = ast.Name | ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The direct children of a node, without the statements in its blocks."""
    for name in node._fields:
        value = getattr(node, name, None)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and each._fields and not isinstance(each, _IN_BLOCKS):
                yield each  # ``Load()``, ``Add()`` and the like have no fields


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """The node and all expressions below it; like ``ast.walk``, but importing ``ast`` takes longer than this runs."""
    yield root
    for each in children(root):
        yield from walk(each)


def find_effect(node: Any) -> Any:
    """Return the node of a side effect: a statement that does more than import, define or name constants; or None."""
    match node:
        case ast.Pass() | ast.Global() | ast.Nonlocal() | ast.Expr(value=ast.Constant()):
            return None
        case ast.Assign(targets=targets, value=value):
            return None if all(isinstance(each, _NAMES) for part in (*targets, value) for each in walk(part)) else node
        case ast.AnnAssign(target=ast.Name(), annotation=annotation, value=value) if not _calls(annotation):
            return None if value is None or all(isinstance(each, _NAMES) for each in walk(value)) else node
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return node if _calls(node) else None
        case ast.ExceptHandler() | ast.match_case():
            return None
    for handler in getattr(node, "handlers", ()):  # of a ``try``
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not all(getattr(kind, "id", None) in _IMPORT_ERRORS for kind in kinds):
            return handler
    return None if hasattr(node, "handlers") else node


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in walk(node))


def as_text(node: ast.AST | None = None, *_: object) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


MODULES = frozenset({"os", "sys", "builtins", "importlib", "logging", "posix", "site"})
"""Modules by which a program can change later imports; if one is passed on, nothing shows what is done with it."""

ANY = frozenset[str]()
SENSITIVE: dict[str, frozenset[str]] = {
    **dict.fromkeys(("environ", "environb", "putenv", "unsetenv"), ANY),
    **dict.fromkeys(("path", "modules", "settrace", "setprofile"), frozenset({"sys"})),
    **dict.fromkeys(("meta_path", "path_hooks", "path_importer_cache", "setdlopenflags", "addaudithook"), ANY),
    **dict.fromkeys(("__import__", "import_module", "find_spec", "exec_module", "load_module", "load_source"), ANY),
    **dict.fromkeys(("spec_from_file_location", "module_from_spec", "SourceFileLoader", "LazyLoader"), ANY),
    **dict.fromkeys(("zipimporter", "walk_packages", "addsitedir", "run_path", "run_module", "__builtins__"), ANY),
    **dict.fromkeys(("exec", "eval", "compile"), frozenset({"builtins"})),
    **dict.fromkeys(("setLoggerClass", "dictConfig", "fileConfig"), ANY),
    **dict.fromkeys(("chdir", "fchdir", "sched_setaffinity", "cpu_affinity"), ANY),
    **dict.fromkeys(("CDLL", "PyDLL", "cdll", "pydll", "pythonapi"), ANY),
    "reload": frozenset({"importlib", "imp"}),
    "config": frozenset({"logging"}),
    "main": frozenset({"site"}),
    **dict.fromkeys(("load", "loads", "Unpickler"), frozenset({"pickle"})),
}
"""Sensitive names: they decide about later imports. Each with the modules that it counts in; empty: in any."""


def sensitive_word(name: str) -> str | None:
    """Return the word of ``SENSITIVE`` that a qualified name ends in, if its module is one of those listed; or None."""
    head, _, last = name.rpartition(".")
    if head.endswith("logging.config"):
        return "dictConfig"
    of = SENSITIVE.get(last)
    return last if of is not None and (not of or head.rpartition(".")[2].lstrip("_") in of) else None


def is_own_name(node: ast.AST | None = None, *, read: bool) -> bool:
    """Whether a key of ``sys.modules`` is the file's own ``__name__``; with ``read``, also any not in ``MODULES``."""
    if read and (text := as_text(node)):
        return text.partition(".")[0] not in MODULES
    match node:
        case ast.BinOp(left=own) | ast.JoinedStr(values=[ast.FormattedValue(value=own), *_]) | own:
            return isinstance(own, ast.Name) and own.id == "__name__"
