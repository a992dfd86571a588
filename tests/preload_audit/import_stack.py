"""Records which module is being imported, and by which, inside an audit's interpreters.

Standard library only; run from its path. What is noted goes by names, as modules come and go.
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
    """The modules that are being executed, outermost first, and all that was seen of imports so far.

    Attributes:
        edges: which modules each imported while it was executed, loaded before or not.
        absent_imports: by name: the stacks in which an import failed, as no such module is installed.
        searches: by top-level name: the stacks in which finders were asked for it.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.edges: dict[str, set[str]] = {}
        self.absent_imports: dict[str, dict[tuple[str, ...], None]] = {}
        self.searches: dict[str, dict[tuple[str, ...], None]] = {}
        self._thread = _thread.get_ident()

    def install(self, begins: Callable[[], None], finished: Callable[[str], None]) -> None:
        """Note every import from here on.

        ``begins`` is called when another module is about to be executed, ``finished`` with the name of one that is
        done, while it is still on the stack.
        """
        load, get, import_ = _BOOTSTRAP._load_unlocked, _BOOTSTRAP._gcd_import, builtins.__import__

        def loading(spec: Any) -> ModuleType:
            if _thread.get_ident() != self._thread:
                return load(spec)  # type: ignore[no-any-return]
            begins()
            above = self.modules[-1] if self.modules else ""
            self.edges.setdefault(above, set()).add(spec.name)
            self.modules.append(spec.name)
            try:
                return load(spec)  # type: ignore[no-any-return]
            finally:
                finished(spec.name)
                self.modules.pop()

        def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            try:
                found = import_(name, globals, locals, fromlist, level)
            except ModuleNotFoundError as error:
                self._add_absent(_absolute(name, globals, level), error)
                raise
            if self.modules:
                self._add_edges(_absolute(name, globals, level), fromlist or ())
            return found

        def getting(name: str, package: str | None = None, level: int = 0) -> ModuleType:
            try:
                found = get(name, package, level)
            except ModuleNotFoundError as error:
                self._add_absent(name, error)
                raise
            if self.modules:
                self._add_edges(found.__name__ if level else name, ())
            return found  # type: ignore[no-any-return]

        _BOOTSTRAP._load_unlocked = _hidden(loading)
        _BOOTSTRAP._gcd_import = _hidden(getting)
        builtins.__import__ = _hidden(importing)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Note what is looked for, as the first of the finders."""
        if path is None and self.modules and name not in sys.stdlib_module_names:
            self.searches.setdefault(name, {})[tuple(self.modules)] = None

    def _add_absent(self, name: str, error: ModuleNotFoundError) -> None:
        absent = error.name or ""
        if self.modules and f"{name}.".startswith(f"{absent}.") and absent not in sys.stdlib_module_names:
            self.absent_imports.setdefault(name, {})[tuple(self.modules)] = None

    def _add_edges(self, name: str, names: Any) -> None:
        edges = self.edges.setdefault(self.modules[-1], set())
        while name:
            edges.add(name)
            above, _, _ = name.rpartition(".")
            for each in names:
                if (child := f"{name}.{each}") in sys.modules:
                    edges.add(child)
            name, names = above, ()


def _absolute(name: str, globals: Any, level: int) -> str:
    if not level:
        return name
    package = (globals or {}).get("__package__") or ""
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


def _hidden(function: Any) -> FunctionType:
    """Have warnings count this function among Python's own, so that they name the same lines as without it."""
    function.__code__ = function.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    return function  # type: ignore[no-any-return]
