"""Makes the package setproctitle work in forked ranks.

The package overwrites the arguments of the process, and searches for those that Python was started with. In a fork
these are the zygote's, already overwritten by ddplaunch's title. So right after its import, the package's functions are
replaced by functions that write as ``proc_utils.set_process_title`` does. Part of the zygote, and bound by its rules.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any

_NAME = "setproctitle"
_MAX_NAME_BYTES = 15  # PR_SET_NAME of prctl(2)


class ForkedProcessTitle:
    """Replaces the functions of the package setproctitle once it is imported."""

    def __init__(self, title: str, write: Callable[[str], None]) -> None:
        """``title`` is the current title; ``write`` sets another one."""
        self._title, self._write = title, write

    def install(self, modules: Mapping[str, ModuleType]) -> None:
        """Replace the functions now if the package is in ``modules`` or, if it is installed, once it is imported."""
        if (module := modules.get(_NAME)) is not None:
            self._replace(module)
        elif any(os.path.isdir(os.path.join(folder, _NAME)) for folder in sys.path):
            self._wrap_path_finder()

    def _wrap_path_finder(self) -> None:
        """Wrap ``PathFinder.find_spec`` until it finds the package: a finder in ``sys.meta_path`` would be visible."""
        finder: Any = sys.modules["_frozen_importlib_external"].PathFinder
        former = vars(finder)["find_spec"]

        def find_spec(cls: object, name: str, path: Any = None, target: Any = None) -> Any:
            spec = former.__func__(cls, name, path, target)
            if name == _NAME and spec is not None and spec.loader is not None:
                finder.find_spec = former
                self._patch_after_import(spec.loader)
            return spec

        finder.find_spec = classmethod(find_spec)

    def _patch_after_import(self, loader: Any) -> None:
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
                    file.write(title.encode(errors="replace")[:_MAX_NAME_BYTES])  # the thread's name, too
            except OSError:
                pass

        def getproctitle() -> str:
            """getproctitle() -- Get the current process title."""
            return self._title

        if hasattr(module, "setproctitle"):
            module.setproctitle, module.getproctitle = setproctitle, getproctitle
