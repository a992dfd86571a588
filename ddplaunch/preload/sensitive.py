"""What in Python decides about later imports: variables, how modules are found and made, and who may change that."""

from __future__ import annotations

import _ast as ast

from ddplaunch.preload.syntax import as_text

MODULES = frozenset({"os", "sys", "builtins", "importlib", "logging", "posix", "site"})
"""Those by which a program can change what later imports do; nothing shows what becomes of one that is passed on."""

ANY = frozenset[str]()
_SYS, _BUILTINS = frozenset({"sys"}), frozenset({"builtins"})
SENSITIVE: dict[str, frozenset[str]] = {
    **dict.fromkeys(("environ", "environb", "putenv", "unsetenv"), ANY),
    **dict.fromkeys(("path", "modules", "settrace", "setprofile"), _SYS),
    **dict.fromkeys(("meta_path", "path_hooks", "path_importer_cache", "setdlopenflags", "addaudithook"), ANY),
    **dict.fromkeys(("__import__", "import_module", "find_spec", "exec_module", "load_module", "load_source"), ANY),
    **dict.fromkeys(("spec_from_file_location", "module_from_spec", "SourceFileLoader", "LazyLoader"), ANY),
    **dict.fromkeys(("zipimporter", "walk_packages", "addsitedir", "run_path", "run_module", "__builtins__"), ANY),
    **dict.fromkeys(("exec", "eval"), _BUILTINS),
    **dict.fromkeys(("setLoggerClass", "dictConfig", "fileConfig"), ANY),
    **dict.fromkeys(("chdir", "fchdir", "sched_setaffinity", "cpu_affinity"), ANY),
    **dict.fromkeys(("CDLL", "PyDLL", "cdll", "pydll", "pythonapi"), ANY),
    "reload": frozenset({"importlib", "imp"}),
    "config": frozenset({"logging"}),
}
"""Names that lead to what decides about later imports, and of which modules they must be; of none: of whatever."""


def sensitive_word(name: str) -> str | None:
    """The word of ``SENSITIVE`` that a qualified name ends in, if it is of such a module."""
    head, _, last = name.rpartition(".")
    if head.endswith("logging.config"):
        return "dictConfig"
    of = SENSITIVE.get(last)
    return last if of is not None and (not of or head.rpartition(".")[2].lstrip("_") in of) else None


def is_own_name(node: ast.AST, *, read: bool = False) -> bool:
    """Whether a key of ``sys.modules`` is the file's own module, or to be read one that is not sensitive."""
    if read and (text := as_text(node)):
        return text.partition(".")[0] not in MODULES
    while isinstance(node, ast.BinOp):
        node = node.left
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.FormattedValue):
        node = node.values[0].value
    return isinstance(node, ast.Name) and node.id == "__name__"
