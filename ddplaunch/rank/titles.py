"""Has the package setproctitle change the title of a forked rank.

It writes over the arguments of the process, and looks for them by those that Python began with: in a fork these are the
zygote's, and a title of ours stands in their place. So its functions are replaced in the module, right after its
import, by ones that write where ``processes.retitle`` does. Part of the zygote, and bound by its rules.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_NAME = "setproctitle"
_MAX_NAME = 15  # bytes, PR_SET_NAME of prctl(2)


class Titles:
    """Replaces the functions of ``setproctitle``, once that is imported."""

    def __init__(self, title: str, write: Callable[[str], None]) -> None:
        """``title`` is the one that there is; ``write`` writes another one."""
        self._title, self._write = title, write

    def install(self) -> None:
        """Replace the functions now, or once they are imported, where the package is installed."""
        if (module := sys.modules.get(_NAME)) is not None:
            self._replace(module)
        elif any(os.path.isdir(os.path.join(folder, _NAME)) for folder in sys.path):
            self._await()

    def _await(self) -> None:
        """Wrap what finds modules in folders until it finds this one; ``sys.meta_path`` would show a finder more."""
        finder: Any = sys.modules["_frozen_importlib_external"].PathFinder
        kept = vars(finder)["find_spec"]

        def find_spec(cls: object, name: str, path: Any = None, target: Any = None) -> Any:
            spec = kept.__func__(cls, name, path, target)
            if name == _NAME and spec is not None and spec.loader is not None:
                finder.find_spec = kept
                self._replace_after(spec.loader)
            return spec

        finder.find_spec = classmethod(find_spec)

    def _replace_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._replace(module)

        loader.exec_module = exec_module

    def _replace(self, module: Any) -> None:
        def setproctitle(title: str) -> None:
            """setproctitle(title) -- Change the process title."""
            if not isinstance(title, str):
                raise TypeError(f"argument 1 must be str, not {title if title is None else type(title).__name__}")
            self._title = title
            self._write(title)
            try:
                with open("/proc/thread-self/comm", "wb") as file:
                    file.write(title.encode(errors="replace")[:_MAX_NAME])  # the name of the thread too
            except OSError:
                pass

        def getproctitle() -> str:
            """getproctitle() -- Get the current process title."""
            return self._title

        if hasattr(module, "setproctitle"):
            module.setproctitle, module.getproctitle = setproctitle, getproctitle
