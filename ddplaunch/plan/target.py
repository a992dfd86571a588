"""What a job runs: a script, a module, a function or a program, found and checked without running any of it."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
from dataclasses import dataclass
from enum import Enum

from ddplaunch.errors import UsageError
from ddplaunch.plan import signature, source
from ddplaunch.plan.signature import Signature


class Kind(Enum):
    """How a target is run."""

    SCRIPT = "script"  # train.py, as `python train.py`
    MODULE = "module"  # -m package.module, as `python -m package.module`
    FUNCTION = "function"  # train.py:main or package.module:function, imported and called
    PROGRAM = "program"  # --no-python ./prog, as the shell would


@dataclass(frozen=True)
class Target:
    """One target with its arguments.

    Attributes:
        typed: the target as the user wrote it.
        path: the script's path as typed; for a function in a file, that file's absolute path; a program's file.
        module: the module to run or to import the function from.
        function: its name, dotted where it is an attribute of an attribute.
        first: the folder that Python puts in front of ``sys.path``.
        source: the absolute path of the Python source, where it was found.
        signature: a function's parameters; None where only running the module can tell.
    """

    kind: Kind
    typed: str
    args: tuple[str, ...] = ()
    path: str | None = None
    module: str | None = None
    function: str | None = None
    first: str | None = None
    source: str | None = None
    signature: Signature | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that each rank's process stands for, as `ps` would show it."""
        if self.kind is Kind.PROGRAM:
            return (self.typed, *self.args)
        flag = ("-m",) if self.kind is Kind.MODULE else ()
        return ("python", *flag, self.typed, *self.args)


_FUNCTION_IN_FILE = re.compile(r"(?P<path>.+\.py):(?P<function>[^:/]*)")
_FUNCTION_IN_MODULE = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<function>[^:/]*)")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def find(typed: str, args: tuple[str, ...], *, as_module: bool, as_program: bool, cwd: str) -> Target:
    """Say what ``typed`` means and check all that can be checked without running it.

    Raises:
        UsageError: there is no such file, module, program or function, or it is none that can be run.
    """
    if as_module and as_program:
        raise UsageError("-m and --no-python contradict each other", "give one of them")
    if not typed:
        raise UsageError("the target is empty", "ddplaunch run train.py --nproc 4")
    if as_program:
        return _program(typed, args, cwd)
    if as_module:
        return _module(typed, args, cwd)
    if match := _FUNCTION_IN_FILE.fullmatch(typed):
        return _function_in_file(typed, match["path"], match["function"], args, cwd)
    if not os.path.exists(os.path.join(cwd, typed)) and (match := _FUNCTION_IN_MODULE.fullmatch(typed)):
        return _function_in_module(typed, match["module"], match["function"], args, cwd)
    return _script(typed, args, cwd)


def _script(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    path = _existing_file(typed, cwd)
    source.parse(path, typed)
    return Target(
        Kind.SCRIPT,
        typed,
        args,
        path=typed,
        first=os.path.dirname(os.path.realpath(path)),
        source=os.path.abspath(path),
    )


def _existing_file(typed: str, cwd: str) -> str:
    path = os.path.join(cwd, typed)
    if os.path.isdir(path):
        inside = [name for name in ("__main__.py", "train.py", "main.py") if os.path.isfile(os.path.join(path, name))]
        hint = f"ddplaunch run {os.path.join(typed, inside[0])}" if inside else "name the script in it"
        raise UsageError(f"{typed} is a directory, not a script", hint)
    if not os.path.exists(path):
        raise UsageError(f"no such script: {typed}", _near_file(typed, cwd))
    if not os.path.isfile(path) and not os.access(path, os.R_OK):
        raise UsageError(f"{typed} is not a file")
    return path


def _near_file(typed: str, cwd: str) -> str | None:
    folder, name = os.path.split(typed)
    try:
        names = os.listdir(os.path.join(cwd, folder) or ".")
    except OSError:
        return f"there is no directory {folder} either"
    if name + ".py" in names:
        return f"did you mean {os.path.join(folder, name)}.py?"
    scripts = [each for each in names if each.endswith(".py")]
    near = difflib.get_close_matches(name, scripts, 1, 0.6)
    if near:
        return f"did you mean {os.path.join(folder, near[0])}?"
    if _DOTTED.fullmatch(typed) and source.find_module(typed, cwd):
        return f"it is a module: ddplaunch run -m {typed}"
    return None


def _module(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    if ":" in typed:
        raise UsageError(f"-m takes a module, and {typed} names a function", f"leave -m out: ddplaunch run {typed}")
    origin = _module_source(typed, cwd, main=True)
    return Target(Kind.MODULE, typed, args, module=typed, first=cwd, source=origin)


def _module_source(name: str, cwd: str, *, main: bool = False) -> str | None:
    """Find the source of module ``name`` (of its ``__main__`` where a package is to be run); None if it has none."""
    if not _DOTTED.fullmatch(name):
        hint = f"leave -m out: ddplaunch run {name}" if name.endswith(".py") or "/" in name else None
        raise UsageError(f"{name} is not a module's name", hint)
    spec = source.find_module(name, cwd)
    if spec is None:
        raise UsageError(f"no module named {name} in {cwd} or on sys.path", _near_module(name, cwd))
    if main and spec.submodule_search_locations is not None:
        main_spec = source.find_module(name + ".__main__", cwd)
        if main_spec is None:
            raise UsageError(f"{name} is a package without a __main__ module", "name a module in it")
        spec = main_spec
    if spec.origin and spec.origin.endswith(".py"):
        source.parse(spec.origin, os.path.relpath(spec.origin, cwd) if spec.origin.startswith(cwd) else spec.origin)
        return spec.origin
    return None


def _near_module(name: str, cwd: str) -> str | None:
    parent, _, last = name.rpartition(".")
    if parent:
        spec = source.find_module(parent, cwd)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if spec is None:
            return f"there is no {parent} either"
    else:
        folders = [cwd]
    names = set[str]()
    for folder in folders:
        if os.path.isdir(folder):
            for entry in os.scandir(folder):
                if entry.name.endswith(".py"):
                    names.add(entry.name[:-3])
                elif entry.is_dir() and os.path.isfile(os.path.join(entry.path, "__init__.py")):
                    names.add(entry.name)
    near = difflib.get_close_matches(last, sorted(names - {"__init__"}), 1, 0.6)
    return f"did you mean {parent + '.' if parent else ''}{near[0]}?" if near else None


def _program(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    if os.sep in typed:
        path = os.path.join(cwd, typed)
        if os.path.isdir(path):
            raise UsageError(f"{typed} is a directory, not a program")
        if not os.path.exists(path):
            raise UsageError(f"no such program: {typed}")
        if not os.access(path, os.X_OK):
            raise UsageError(f"{typed} is not executable", f"chmod +x {typed}")
        return Target(Kind.PROGRAM, typed, args, path=path)
    found = shutil.which(typed)
    if found is None:
        here = os.path.isfile(os.path.join(cwd, typed))
        raise UsageError(f"no program named {typed} on PATH", f"did you mean ./{typed}?" if here else None)
    return Target(Kind.PROGRAM, typed, args, path=found)


def _function_in_file(typed: str, path: str, function: str, args: tuple[str, ...], cwd: str) -> Target:
    file = os.path.abspath(_existing_file(path, cwd))
    found = _signature(typed, path, function, source.parse(file, path))
    folder, name = os.path.split(os.path.realpath(file))
    return Target(
        Kind.FUNCTION, typed, args, path=file, module=name[:-3], function=function, first=folder, source=file,
        signature=found,
    )  # fmt: skip


def _function_in_module(typed: str, module: str, function: str, args: tuple[str, ...], cwd: str) -> Target:
    file = _module_source(module, cwd)
    found = _signature(typed, module, function, source.parse(file)) if file else None
    return Target(Kind.FUNCTION, typed, args, module=module, function=function, first=cwd, source=file, signature=found)


def _signature(typed: str, where: str, function: str, module: ast.Module) -> Signature | None:
    """Read ``function``'s signature from its module; None where only running the module can tell.

    Raises:
        UsageError: the source shows that there is no such function, or that the name is something else.
    """
    names = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if not _DOTTED.fullmatch(function):
        example = f"{where}:{names[0]}" if names else f"{where}:main"
        raise UsageError(f"{function!r} is not a function's name", f"write it like {example}")
    if "." in function:
        return None
    bindings = [node for node in _top_level(module) if function in _bound_names(node)]
    if not bindings:
        if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(module)):
            return None
        if "__getattr__" in names:
            return None
        near = difflib.get_close_matches(function, names, 1, 0.5)
        hint = f"did you mean {where}:{near[0]}?" if near else None
        if not near and names:
            hint = f"its functions: {', '.join(names[:8])}"
        raise UsageError(f"{where} has no function {function}", hint)
    node = bindings[-1]
    if isinstance(node, ast.AsyncFunctionDef):
        raise UsageError(f"{typed} is a coroutine function", "wrap it in a function that calls asyncio.run")
    if isinstance(node, ast.ClassDef):
        raise UsageError(
            f"{typed} is a class, not a function", f"its functions: {', '.join(names[:8])}" if names else None
        )
    value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    if isinstance(value, (ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Set, ast.JoinedStr)):
        raise UsageError(f"{typed} is not a function: {function} = {ast.unparse(value)[:60]}")
    if len(bindings) == 1 and isinstance(node, ast.FunctionDef) and not node.decorator_list and node in module.body:
        return signature.from_source(typed, node, module)
    return None


def _top_level(module: ast.Module) -> list[ast.AST]:
    """All statements that run in the module's own namespace, those in its if, try, with and for blocks included."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = list(module.body)
    while todo:
        node = todo.pop(0)
        found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            todo[:0] = [
                child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))
            ]
    return found


def _bound_names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()
