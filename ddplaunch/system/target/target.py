"""Finds the target of a job (script, module, function or program) and checks it without running it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import zipimport
from enum import Enum
from functools import cached_property

from msgspec import Struct

from ddplaunch.base.errors import UsageError
from ddplaunch.base.safe_files import list_dir
from ddplaunch.base.text import closest_match
from ddplaunch.system.target import source
from ddplaunch.system.target.function_lookup import find_function
from ddplaunch.system.target.signature import Signature


class TargetKind(Enum):
    """The kind of a target, which decides how it is run."""

    SCRIPT = "script"  # train.py, or train.pyc, as `python train.py`
    MAIN = "main"  # a folder or a zip archive with a __main__.py, as `python folder`
    MODULE = "module"  # -m package.module, as `python -m package.module`
    FUNCTION = "function"  # train.py:main or package.module:function, imported and called
    PROGRAM = "program"  # --no-python ./prog, as the shell would


class Target(Struct, frozen=True, dict=True):
    """One target with its arguments."""

    kind: TargetKind
    text: str  # as given by the user
    args: tuple[str, ...] = ()
    path: str | None = None  # of a script, folder or archive as given; the absolute path of a function's file
    module: str | None = None  # the module to run or to import the function from
    function: str | None = None  # its name, dotted if it is an attribute of a class or object
    sys_path_0: str | None = None  # the first entry of `sys.path`
    source: str | None = None  # the absolute path of the Python source, if found
    signature: Signature | None = None  # a function's parameters; None if only running the module can show them

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that `ps` shows for each rank's process."""
        if self.kind is TargetKind.PROGRAM:
            return (self.text, *self.args)
        flag = ("-m",) if self.kind is TargetKind.MODULE else ()
        return ("python", *flag, self.text, *self.args)

    @property
    def local_rank_option(self) -> str:
        """The option of ``--pass-local-rank``: torch's since 2.0, or the older one if the source has only that."""
        if self.source is None or self.sys_path_0 is None:
            return "--local-rank"
        texts = list(source.local_sources(self.source, self.sys_path_0))
        newer, older = (
            any(f"{quote}{option}{quote}" in text for text in texts for quote in "'\"")
            for option in ("--local-rank", "--local_rank")
        )
        return "--local_rank" if older and not newer else "--local-rank"

    def has_option(self, option: str) -> bool:
        """Whether the program has an option of this name ("--log-dir"), according to its source file."""
        if self.signature is not None and not self.signature.reads_argv:
            if self.signature.namespace:
                texts = [each for call in self.signature.option_calls for each in call.args]
                return any(isinstance(each, ast.Constant) and each.value == option for each in texts)
            return option.lstrip("-").replace("-", "_") in {parameter.name for parameter in self.signature.typed}
        return option in self._options

    @cached_property
    def _options(self) -> frozenset[str]:
        return source.find_option_names(source.parse_file(self.source)) if self.source else frozenset()


_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_FUNCTION_IN_FILE = r"(?P<path>.+\.py):(?P<function>[^:/]*)"
_PYTEST_FUNCTION = r"(?P<path>.+\.py)::(?P<function>\w+)"
_FUNCTION_IN_MODULE = rf"(?P<module>{_DOTTED}):(?P<function>[^:/]*)"


def find_target(typed: str, args: tuple[str, ...], *, as_module: bool, as_program: bool, cwd: str) -> Target:
    """Find the target that the user named ``typed``, and check it as far as possible without running it.

    Raises UsageError if the file, module, program or function does not exist or cannot be run.
    """
    if as_module and as_program:
        raise UsageError("-m and --no-python contradict each other", "give one of them")
    if not typed:
        raise UsageError("the target is empty", "ddplaunch run train.py --nproc 4")
    if as_program:
        return _find_program(typed, args, cwd)
    if typed == "-":
        raise UsageError("a program cannot be read from stdin: each rank needs it", "write it to a file, train.py")
    if as_module:
        return _find_module(typed, args, cwd)
    if ":" in typed and not os.path.exists(os.path.join(cwd, typed)):  # a file may have a colon in its name
        if match := re.fullmatch(_FUNCTION_IN_FILE, typed):
            return _function_in_file(typed, match["path"], match["function"], args, cwd)
        if match := re.fullmatch(_FUNCTION_IN_MODULE, typed):
            return _function_in_module(typed, match["module"], match["function"], args, cwd)
    return _find_script(typed, args, cwd)


def _find_script(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    path = os.path.join(cwd, typed)
    mains = [os.path.join(typed, name) for name in ("__main__.py", "__main__.pyc")] if os.path.isdir(path) else []
    if main := next((each for each in mains if os.path.isfile(os.path.join(cwd, each))), None):
        found = os.path.abspath(os.path.join(cwd, main))
        return Target(TargetKind.MAIN, typed, args, path=typed, sys_path_0=path, source=_check_file(found, main))
    path = _require_file(typed, cwd)
    if not typed.endswith((".py", ".pyc")) and _is_archive(path, typed):
        return Target(TargetKind.MAIN, typed, args, path=typed, sys_path_0=path)
    folder = os.path.dirname(os.path.realpath(path))
    return Target(
        TargetKind.SCRIPT, typed, args, path=typed, sys_path_0=folder, source=_check_file(os.path.abspath(path), typed)
    )


def _check_file(path: str, name: str) -> str | None:
    """Check that a Python file can be run; return its path, or None for compiled code, which cannot be searched."""
    if path.endswith(".pyc"):
        source.check_compiled(path, name)
        return None
    source.parse_file(path, name)
    return path


def _is_archive(path: str, name: str) -> bool:
    """Whether Python treats a file as a zip archive. Raises UsageError if it is one without a ``__main__``."""
    try:
        archive = zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    try:
        found = archive.find_spec("__main__") is not None
    except Exception:  # damaged: Python reports the error when it runs it
        found = True
    if not found:
        raise UsageError(f"{name} is an archive without a __main__.py", "python -m zipapp makes one that can be run")
    return True


def _find_module(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    if ":" in typed:
        raise UsageError(f"-m takes a module, and {typed} names a function", f"leave -m out: ddplaunch run {typed}")
    origin = _module_source(typed, cwd, main=True)
    return Target(TargetKind.MODULE, typed, args, module=typed, sys_path_0=cwd, source=origin)


def _find_program(typed: str, args: tuple[str, ...], cwd: str) -> Target:
    if os.sep in typed:
        path = os.path.join(cwd, typed)
        if os.path.isdir(path):
            raise UsageError(f"{typed} is a folder, not a program")
        if not os.path.exists(path):
            folder, name = os.path.split(typed)
            near = closest_match(name, list_dir(os.path.join(cwd, folder)))
            raise UsageError(f"no such program: {typed}", _did_you_mean(near and os.path.join(folder, near)))
        if not os.access(path, os.X_OK):
            raise UsageError(f"{typed} is not executable", f"chmod +x {typed}")
        return Target(TargetKind.PROGRAM, typed, args, path=path)

    found = shutil.which(typed)
    if found is None:
        here = os.path.isfile(os.path.join(cwd, typed))
        raise UsageError(f"no program named {typed} on PATH", _did_you_mean(f"./{typed}" if here else None))
    return Target(TargetKind.PROGRAM, typed, args, path=found)


def _function_in_file(typed: str, path: str, function: str, args: tuple[str, ...], cwd: str) -> Target:
    file = os.path.abspath(_require_file(path, cwd))
    found = find_function(typed, path, function, source.parse_file(file, path))
    folder, name = os.path.split(os.path.realpath(file))
    return Target(TargetKind.FUNCTION, typed, args, file, name[:-3], function, folder, source=file, signature=found)


def _function_in_module(typed: str, module: str, function: str, args: tuple[str, ...], cwd: str) -> Target:
    file = _module_source(module, cwd)
    found = find_function(typed, module, function, source.parse_file(file)) if file else None
    return Target(
        TargetKind.FUNCTION, typed, args, module=module, function=function, sys_path_0=cwd, source=file, signature=found
    )


# --------------------------------------------------------------------------------- existing files and suggestions


def _require_file(typed: str, cwd: str) -> str:
    path = os.path.join(cwd, typed)
    if os.path.isdir(path):
        inside = [name for name in ("train.py", "main.py") if os.path.isfile(os.path.join(path, name))]
        hint = f"ddplaunch run {os.path.join(typed, inside[0])}" if inside else "name the script in it"
        raise UsageError(f"{typed} is a folder, not a script", hint)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise UsageError(f"{typed} is a link to {os.readlink(path)}, which does not exist") from None
        raise UsageError(f"no such script: {typed}", _similar_file_hint(typed, cwd)) from None
    except OSError as error:
        raise UsageError(f"cannot read {typed}: {error.strerror}") from None
    if not os.path.isfile(path):  # reading a pipe would empty it
        raise UsageError(f"{typed} is not a regular file", "name a script")
    return path


def _similar_file_hint(typed: str, cwd: str) -> str | None:
    folder, name = os.path.split(typed)
    if folder and not os.path.isdir(os.path.join(cwd, folder)):
        parent, last = os.path.split(folder)
        near = closest_match(last, list_dir(os.path.join(cwd, parent)))
        other = near and os.path.join(parent, near, name)
        if other and os.path.isfile(os.path.join(cwd, other)):
            return _did_you_mean(other)
        return f"the folder {folder} does not exist"
    if match := re.fullmatch(_PYTEST_FUNCTION, typed):
        return _did_you_mean(f"{match['path']}:{match['function']}")
    module, _, function = typed.rpartition(".")
    if re.fullmatch(_DOTTED, module) and os.path.isfile(os.path.join(cwd, path := module.replace(".", os.sep) + ".py")):
        return _did_you_mean(f"{path}:{function}")
    names = list_dir(os.path.join(cwd, folder))
    near = (
        name + ".py" if name + ".py" in names else closest_match(name, [each for each in names if each.endswith(".py")])
    )
    if near:
        return _did_you_mean(os.path.join(folder, near))
    if re.fullmatch(_DOTTED, typed) and source.find_module(typed, cwd):
        return f"it is a module: ddplaunch run -m {typed}"
    return None


def _module_source(name: str, cwd: str, *, main: bool = False) -> str | None:
    """Return the path of a module's source; ``main``: of a package, its ``__main__``'s. None if it has no source."""
    if name.endswith(".py") and os.path.isfile(os.path.join(cwd, name)):
        raise UsageError(f"-m takes a module, and {name} is a file", f"leave -m out: ddplaunch run {name}")
    if not re.fullmatch(_DOTTED, name):
        raise UsageError(f"{name} is not a module name", "write it like package.module")
    spec = source.find_module(name, cwd)
    if spec is None:
        raise UsageError(f"no module named {name} in {cwd} or on sys.path", _similar_module_hint(name, cwd))
    if main and spec.submodule_search_locations is not None:
        spec = source.find_module(name + ".__main__", cwd)
        if spec is None:
            raise UsageError(f"{name} is a package without a __main__ module", "name a module in it")
    if spec.origin and spec.origin.endswith(".py"):
        source.parse_file(
            spec.origin, os.path.relpath(spec.origin, cwd) if spec.origin.startswith(cwd) else spec.origin
        )
        return spec.origin
    return None


def _similar_module_hint(name: str, cwd: str) -> str | None:
    parent, dot, last = name.rpartition(".")
    folders = [cwd]
    if parent:
        spec = source.find_module(parent, cwd)
        if spec is None:
            return f"there is no module {parent}"
        folders = list(spec.submodule_search_locations or ())
    entries = [(folder, entry) for folder in folders for entry in list_dir(folder)]
    names = {entry[:-3] for _, entry in entries if entry.endswith(".py") and entry != "__init__.py"}
    names |= {entry for folder, entry in entries if os.path.isfile(os.path.join(folder, entry, "__init__.py"))}
    near = closest_match(last, names)
    return _did_you_mean(near and f"{parent}{dot}{near}")


def _did_you_mean(name: str | None) -> str | None:
    return f"did you mean {name}?" if name else None
