"""What the user's own folders hide of installed packages, or add to them."""

from __future__ import annotations

import os
import re

_INFO = re.compile(r"(.+?)(?:-[^-]*)?\.(?:dist|egg)-info")
_OF_COMMANDS = re.compile(r"\[(console_scripts|gui_scripts)\]")


class Hiding:
    """What is in folders that come before those of installed packages, or may."""

    def __init__(self, folders: list[str]) -> None:
        self._modules: dict[str, str] = {}  # paths
        self._distributions: dict[str, str] = {}
        self._plugins: str | None = None
        for folder in dict.fromkeys(map(os.path.abspath, folders)):
            self._look(folder)

    def _look(self, folder: str) -> None:
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            return
        for entry in entries:
            path = os.path.join(folder, entry)
            if found := _INFO.fullmatch(entry):
                self._distributions.setdefault(re.sub(r"[-_.]+", "-", found[1]).lower(), path)
                if _has_plugins(path):
                    self._plugins = self._plugins or path
            elif entry.endswith((".py", ".pyc", ".so")) or os.path.isfile(os.path.join(path, "__init__.py")):
                self._modules.setdefault(entry.partition(".")[0], path)

    def hides(self, tops: set[str], distributions: set[str]) -> str | None:
        """Name what an import of these top-level modules, of these distributions, would find here instead."""
        for name in sorted({top.partition(".")[0] for top in tops} & self._modules.keys()):
            return self._modules[name]
        for name in sorted(distributions & self._distributions.keys()):
            return self._distributions[name]
        return self._plugins


def _has_plugins(info: str) -> bool:
    """Whether a distribution has entry points that others load; those of commands are for the shell."""
    try:
        with open(os.path.join(info, "entry_points.txt"), encoding="utf-8", errors="replace") as file:
            return any(line.startswith("[") and not _OF_COMMANDS.match(line) for line in file)
    except OSError:
        return False
