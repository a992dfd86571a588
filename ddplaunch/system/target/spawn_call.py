"""Finds a call of ``mp.spawn`` in a script: users rarely want that each rank spawns processes of its own."""

from __future__ import annotations

import ast
import shlex

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import read_regular_file
from ddplaunch.system.target import source
from ddplaunch.system.target.signature import INJECTED_PARAMETERS
from ddplaunch.system.target.target import Target, TargetKind

_MODULES = ("mp", "multiprocessing", "torch_mp")


def spawn_call_note(target: Target, local_ranks: int) -> str | None:
    """Return a note if several ranks here would each call ``mp.spawn``, with what to type instead."""
    if local_ranks < 2 or target.kind not in (TargetKind.SCRIPT, TargetKind.MODULE) or target.source is None:
        return None
    try:
        if b"spawn(" not in read_regular_file(target.source, source.MAX_SOURCE):  # parsing takes longer
            return None
        tree = source.parse_file(target.source)
    except (OSError, UsageError):
        return None
    call = _find_call(tree)
    if call is None:
        return None
    name = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else "FUNCTION"
    where = f"{target.text if target.kind is TargetKind.SCRIPT else target.source}:{call.lineno}"
    own = f"{target.text}:{name}"
    words = shlex.join(["ddplaunch", "run", "--nproc", str(local_ranks), own, *target.args])
    first = _first_parameter(tree, name)
    renamed = "" if first is None or first in INJECTED_PARAMETERS else f", with {first} renamed to rank"
    return (
        f"{where} calls mp.spawn: each of {local_ranks} ranks will start processes of its own. "
        f"To run {name} in each rank: {words}{renamed}; or call launch({name}, nproc={local_ranks}) in its place"
    )


def _find_call(tree: ast.Module) -> ast.Call | None:
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("torch.multiprocessing", "torch.multiprocessing.spawn")
        for alias in node.names
        if alias.name == "spawn"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr == "spawn" and _last_name(called.value) in _MODULES:
                return node
            if isinstance(called, ast.Name) and called.id in names:
                return node
    return None


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _first_parameter(tree: ast.Module, name: str) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and node.args.args:
            return node.args.args[0].arg
    return None
