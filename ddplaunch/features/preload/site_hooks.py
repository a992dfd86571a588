"""Finds start-up code that may depend on the rank: sitecustomize, ``.pth`` files, and torch's backend plugins.

Python imports ``sitecustomize`` and ``usercustomize``, and executes the lines of ``.pth`` files that begin with
"import" (https://docs.python.org/3/library/site.html). A zygote runs them once, before a rank and its variables exist.
So ranks are forked only if all this code is known to do the same in each rank: it is one of ``_KNOWN_LINES``, or only
looks at paths, versions and single variables, and changes ``sys.path``.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping

from ddplaunch.base.entry_points import find_entry_points
from ddplaunch.base.safe_files import list_dir, read_regular_file
from ddplaunch.features.preload.known_packages import is_site_dir

_MAX_FILE_BYTES = 1 << 20

_KNOWN_LINES = {
    r"import __editable___\w+; ?__editable___\w+\.install\(\)": (),  # setuptools
    r"import _\w+_editable(_loader)?": (),  # scikit-build-core, meson-python
    r"import _virtualenv": (),
    r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = .*; enabled and __import__\('_distutils_hack'\).*": (),
    r"import sys, ?types, ?os; ?(has_mfs = .*; ?)?p = os\.path\.join\(sys\._getframe\(1\)\.f_locals\['sitedir'\].*": (),
    r"import sys; sys\.__plen = len\(sys\.path\)|import sys; new ?= ?sys\.path\[sys\.__plen:\].*": (),  # setuptools
    r"import (sys|coverage); .*coverage.*process_startup\(.*": ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
    r"import os, sys;exec\('if .COV_CORE_SOURCE. in os\.environ:.*": ("COV_CORE_SOURCE",),  # pytest-cov
}
"""Lines of ``.pth`` files that packages install, each with the variables that, if set, make it do more."""

_KNOWN_CODE = (
    "try: import apport_python_hook\nexcept ImportError: pass\nelse: apport_python_hook.install()",  # Debian, Ubuntu
)
"""Code of ``sitecustomize.py`` that systems install."""

_HARMLESS_NAMES = {
    "os": {"environ", "name", "path", "pathsep", "sep"},
    "site": {"addsitedir"},
    "sys": {"base_prefix", "exec_prefix", "executable", "path", "platform", "prefix", "stderr", "version_info"},
}
"""Modules that start-up code may import, and what it may use of them."""

_HARMLESS_BUILTINS = {
    *("ImportError", "KeyError", "OSError", "any", "all", "bool", "dict", "enumerate", "filter", "int", "isinstance"),
    *("len", "list", "map", "max", "min", "print", "range", "reversed", "set", "sorted", "str", "tuple", "zip"),
    "__file__",
}


def find_unsafe_start_code(rank_variables: Collection[str]) -> str | None:
    """Find a start-up file whose code may do something else in a rank: "…/sitecustomize.py runs code …"."""
    for path, text in _list_start_code():
        if match := re.search(rf"\b({'|'.join(map(re.escape, sorted(rank_variables)))})\b", text):
            return f"{path} mentions {match[1]}, which is not set when the zygote starts Python"
        if not _is_known_line(text) and not _is_harmless(text):
            return f"{path} runs code when Python starts, which may do something else in each rank"
    return None


def find_backend_plugin(sys_path_0: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the distribution whose backend plugin ``import torch`` loads, as "torch-npu 2.5".

    None without one, or if ``TORCH_DEVICE_BACKEND_AUTOLOAD`` in ``environ`` disables plugins.
    """
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return None
    folders = filter(None, [sys_path_0, *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    found = find_entry_points("torch.backends", [*dict.fromkeys(folders)])
    return found[0].distribution if found else None


def _list_start_code() -> Iterator[tuple[str, str]]:
    """Yield the start-up code of this interpreter, as path and text; ``.pth`` files line by line."""
    for name in ("sitecustomize", "usercustomize"):
        if path := getattr(sys.modules.get(name), "__file__", None):
            yield path, _read_text(path)
    for folder in filter(is_site_dir, sys.path):
        for path in [os.path.join(folder, each) for each in list_dir(folder) if each.endswith(".pth")]:
            lines = _read_text(path).splitlines()
            yield from ((path, line) for line in lines if line.startswith(("import ", "import\t")))


def _is_known_line(text: str) -> bool:
    for line, variables in _KNOWN_LINES.items():
        if re.fullmatch(line, text.strip()):
            return os.environ.keys().isdisjoint(variables)
    return False


def _is_harmless(text: str) -> bool:
    """Whether code uses nothing but ``_HARMLESS_NAMES``, ``_HARMLESS_BUILTINS`` and its own names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    if ast.dump(tree) in {ast.dump(ast.parse(each)) for each in _KNOWN_CODE}:
        return True
    nodes = list(ast.walk(tree))
    own = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    own |= {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
    own |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    return all(_is_harmless_node(each, nodes, own) for each in nodes)


def _is_harmless_node(node: ast.AST, nodes: list[ast.AST], own: set[str]) -> bool:
    if isinstance(node, ast.Import):
        return all(each.name in _HARMLESS_NAMES and not each.asname for each in node.names)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _HARMLESS_NAMES:
        if node.value.id in own or node.attr not in _HARMLESS_NAMES[node.value.id]:
            return False
        if isinstance(node.ctx, ast.Store) and (node.value.id, node.attr) != ("sys", "path"):
            return False
        return node.attr != "environ" or any(_reads_one_variable(each, node) for each in nodes)
    if isinstance(node, ast.Name) and node.id in _HARMLESS_NAMES:
        return any(isinstance(each, ast.Attribute) and each.value is node for each in nodes)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id in own or node.id in _HARMLESS_BUILTINS
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("_") and not isinstance(node.ctx, ast.Store)
    return not isinstance(node, ast.ImportFrom | ast.Global | ast.Await | ast.AsyncFor | ast.AsyncWith | ast.ClassDef)


def _reads_one_variable(node: ast.AST, environ: ast.Attribute) -> bool:
    """Whether a node is ``environ["NAME"]``, ``"NAME" in environ`` or ``environ.get("NAME")``."""
    if isinstance(node, ast.Subscript):
        return node.value is environ and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    if isinstance(node, ast.Compare):
        return node.comparators == [environ] and isinstance(node.left, ast.Constant)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.value is environ:
        return node.func.attr == "get" and bool(node.args) and isinstance(node.args[0], ast.Constant)
    return False


def _read_text(path: str) -> str:
    try:
        return read_regular_file(path, _MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return "raise OSError"
