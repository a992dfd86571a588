"""Records which module is being imported, and by which, inside an audit's interpreters.

Standard library only; loaded by its path. Modules are recorded by name, as a failed import removes its module.
"""

from __future__ import annotations

import _thread
import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType, ModuleType
    from typing import Any

_BOOTSTRAP: Any = sys.modules["_frozen_importlib"]


class ImportStack:
    """The modules that are being executed, outermost first, and all imports so far.

    Attributes:
        edges: by module: the modules that it imported while it was executed, loaded before or not.
        absent_imports: by module: the stacks in which an import failed, as no such module is installed.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.edges: dict[str, set[str]] = {}
        self.absent_imports: dict[str, dict[tuple[str, ...], None]] = {}
        self._thread = _thread.get_ident()

    def install(self, on_module_start: Callable[[], None], on_module_end: Callable[[str], None]) -> None:
        """Record all imports from here on.

        ``on_module_start`` is called before a module is executed, ``on_module_end`` with the name of one that was,
        while it is still on the stack.
        """
        load, import_by_name, import_statement = _BOOTSTRAP._load_unlocked, _BOOTSTRAP._gcd_import, builtins.__import__

        def wrapped_load(spec: Any) -> ModuleType:
            if _thread.get_ident() != self._thread:
                return load(spec)  # type: ignore[no-any-return]
            on_module_start()
            importer = self.modules[-1] if self.modules else ""
            self.edges.setdefault(importer, set()).add(spec.name)
            self.modules.append(spec.name)
            try:
                return load(spec)  # type: ignore[no-any-return]
            finally:
                on_module_end(spec.name)
                self.modules.pop()

        def wrapped_statement(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            try:
                module = import_statement(name, globals, locals, fromlist, level)
            except ModuleNotFoundError as error:
                self._add_absent(_resolve_name(name, globals, level), error)
                raise
            if self.modules:
                self._add_edges(_resolve_name(name, globals, level), fromlist or ())
            return module

        def wrapped_import(name: str, package: str | None = None, level: int = 0) -> ModuleType:
            try:
                module = import_by_name(name, package, level)
            except ModuleNotFoundError as error:
                self._add_absent(name, error)
                raise
            if self.modules:
                self._add_edges(module.__name__ if level else name, ())
            return module  # type: ignore[no-any-return]

        _BOOTSTRAP._load_unlocked = _hide_from_warnings(wrapped_load)
        _BOOTSTRAP._gcd_import = _hide_from_warnings(wrapped_import)
        builtins.__import__ = _hide_from_warnings(wrapped_statement)

    def _add_absent(self, name: str, error: ModuleNotFoundError) -> None:
        absent = error.name or ""
        if self.modules and f"{name}.".startswith(f"{absent}.") and absent not in sys.stdlib_module_names:
            self.absent_imports.setdefault(name, {})[tuple(self.modules)] = None

    def _add_edges(self, name: str, names: Any) -> None:
        """Record an import of a module, its parents, and those of ``names`` that are its submodules."""
        edges = self.edges.setdefault(self.modules[-1], set())
        while name:
            edges.add(name)
            parent = name.rpartition(".")[0]
            for each in names:
                if (child := f"{name}.{each}") in sys.modules:
                    edges.add(child)
            name, names = parent, ()


def _resolve_name(name: str, globals: Any, level: int) -> str:
    """The absolute name of what an import statement names."""
    if not level:
        return name
    package = (globals or {}).get("__package__") or ""
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


def _hide_from_warnings(function: Any) -> FunctionType:
    """Make warnings skip this function's frame, as those of importlib, so that they name the same lines."""
    function.__code__ = function.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    return function  # type: ignore[no-any-return]
